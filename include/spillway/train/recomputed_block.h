// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// What Engine::call makes of a block and its inputs, for its template alone.
namespace spillway::detail {

template <class T>
inline constexpr bool kIsTensor = std::is_same_v<T, torch::Tensor>;

/// Whether a type of the standard library's or LibTorch's has tensors inside.
template <class T>
inline constexpr bool kHoldsTensors = false;
template <class T>
inline constexpr bool kIsOrHolds = kIsTensor<std::remove_cvref_t<T>> || kHoldsTensors<std::remove_cvref_t<T>>;
template <template <class...> class Holder, class... Parts>
inline constexpr bool kHoldsTensors<Holder<Parts...>> = (kIsOrHolds<Parts> || ...);
template <template <class, auto> class Holder, class T, auto kCount>  // std::array, c10::SmallVector
inline constexpr bool kHoldsTensors<Holder<T, kCount>> = kIsOrHolds<T>;

/// Whether a tensor inside of `value` needs a gradient; true where that cannot be seen.
template <class T>
bool needs_gradient_inside(const T& value) {
  const auto needs = [](const auto& part) {
    using Part = std::remove_cvref_t<decltype(part)>;
    if constexpr (kIsTensor<Part>) {
      return part.defined() && part.requires_grad();
    } else {
      return needs_gradient_inside(part);
    }
  };
  if constexpr (!kHoldsTensors<T>) {
    return false;
  } else if constexpr (requires { value.has_value(); }) {
    return value.has_value() && needs(*value);
  } else if constexpr (requires { value.begin(); }) {
    return std::any_of(value.begin(), value.end(), needs);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    return std::apply([&](const auto&... parts) { return (needs(parts) || ...); }, value);
  } else {
    return true;
  }
}

/// A block and its inputs, to be run any number of times with the tensors among them replaced.
template <class ModuleType, class... Stored>
class RecomputedBlock {
 public:
  template <class... Inputs>
  explicit RecomputedBlock(ModuleType& module, Inputs&&... inputs)
      : module_(&module), inputs_(std::forward<Inputs>(inputs)...) {}
  /// Moves the tensors out, so that this object keeps no graph alive.
  std::vector<torch::Tensor> take_tensors() {
    std::vector<torch::Tensor> out;
    const auto take = [&out](auto& input) {
      if constexpr (kIsTensor<std::decay_t<decltype(input)>>) out.push_back(std::exchange(input, torch::Tensor()));
    };
    std::apply([&](auto&... all) { (take(all), ...); }, inputs_);
    return out;
  }
  std::vector<torch::Tensor> operator()(const std::vector<torch::Tensor>& tensors) const {
    std::tuple<Stored...> inputs = inputs_;
    std::size_t next = 0;
    const auto give = [&](auto& input) {
      if constexpr (kIsTensor<std::decay_t<decltype(input)>>) input = tensors.at(next++);
    };
    std::apply([&](auto&... all) { (give(all), ...); }, inputs);
    return {std::apply([&](auto&... all) { return module_->forward(all...); }, inputs)};
  }

 private:
  ModuleType* module_;
  std::tuple<Stored...> inputs_;
};

}  // namespace spillway::detail
