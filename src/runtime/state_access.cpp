// SPDX-License-Identifier: Apache-2.0
//
// Reading and setting whole states by parameter, rules in place of the optimizer, release and restore of all pools.
#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/runtime_impl.h"

namespace spillway {
namespace {

// Where a segment's part of a role lies.
View part_of(const ChunkStore& store, StateRole role, const Segment& segment) {
  const View& chunk = role.kind == StateRole::Kind::master     ? store.master(segment.chunk)
                      : role.kind == StateRole::Kind::gradient ? store.gradient(segment.chunk)
                                                               : store.optimizer_state(segment.chunk, role.k);
  const std::int64_t size = role.kind == StateRole::Kind::gradient ? size_of(store.spec().gradient) : 4;
  return chunk.slice({segment.chunk_offset * size}, {segment.count * size});
}

}  // namespace

void Runtime::read(StateRole role, std::int64_t parameter, float* values) {
  wait_all();
  const DType type = role.kind == StateRole::Kind::gradient ? spec_.gradient : DType::f32;
  for (const Segment& segment : layout_.parameter_segments(parameter)) {
    const View part = part_of(*store_, role, segment);
    if (part.data == nullptr) continue;  // a virtual machine's
    impl_->kernels.widen(values + segment.parameter_offset, part.data, element_of(type), segment.count);
  }
}

void Runtime::write(StateRole role, std::int64_t parameter, const float* values) {
  wait_all();
  const bool gradient = role.kind == StateRole::Kind::gradient;
  const DType type = gradient ? spec_.gradient : DType::f32;
  for (const Segment& segment : layout_.parameter_segments(parameter)) {
    const float* from = values + segment.parameter_offset;
    if (gradient) note_gradient(segment);
    const View part = part_of(*store_, role, segment);
    if (part.data == nullptr) continue;  // a virtual machine's
    if (type == DType::f32) {
      std::copy_n(from, segment.count, part.as<float>());
    } else {
      impl_->kernels.narrow(part.data, element_of(type), from, segment.count);
    }
    if (role.kind != StateRole::Kind::master) continue;
    const View working = store_->working(segment.chunk);
    if (working.data == store_->master(segment.chunk).data) continue;
    impl_->kernels.narrow(working.data + segment.chunk_offset * size_of(spec_.working), element_of(spec_.working), from,
                          segment.count);
  }
}

void Runtime::set_update_rule(std::int64_t parameter, UpdateRule rule) {
  const ParameterInfo& info = layout_.parameters()[static_cast<std::size_t>(parameter)];
  const auto segments = layout_.parameter_segments(parameter);
  for (const Segment& segment : segments) {
    require(store_->placement(segment.chunk) == store_->placement(segments.front().chunk),
            fmt::format("{} has an update rule of its own, but its chunks lie in several tiers", info.name));
  }
  // Roles are allocated chunk after chunk, and chunks are whole pages: a role of one tier is one array.
  for (std::size_t i = 1; i < segments.size(); ++i) {
    const View before = store_->master(segments[i - 1].chunk);
    check(before.data + before.size.value == store_->master(segments[i].chunk).data, "a role's chunks are neighbours");
  }
  parameters_[static_cast<std::size_t>(parameter)].rule = std::move(rule);
}

RuleArrays Runtime::rule_arrays(std::int64_t parameter, float grad_factor) const {
  const Segment& first = layout_.parameter_segments(parameter).front();
  const ParameterInfo& info = layout_.parameters()[static_cast<std::size_t>(parameter)];
  RuleArrays out;
  out.parameter = parameter;
  out.count = info.numel();
  out.updates = updates(parameter);
  out.on_device = on_device(store_->placement(first.chunk).master);
  out.master = store_->master(first.chunk).as<float>() + first.chunk_offset;
  out.gradient = store_->gradient(first.chunk).data + first.chunk_offset * size_of(spec_.gradient);
  out.gradient_type = spec_.gradient;
  out.grad_factor = grad_factor;
  for (std::int64_t k = 0; k < spec_.optimizer_states; ++k) {
    out.states.push_back(store_->optimizer_state(first.chunk, k).as<float>() + first.chunk_offset);
  }
  out.hyperparameters = hyperparameters_[static_cast<std::size_t>(info.group)];
  return out;
}

// ---- release and restore
// ---------------------------------------------------------------------------------------------

template <class Visit>
void Runtime::for_kept_views(const ChunkStore& store, const Visit& visit) const {
  for (std::int64_t c = 0; c < static_cast<std::int64_t>(layout_.chunks().size()); ++c) {
    if (store.master(c).data != store.working(c).data) visit(store.master(c));
    for (std::int64_t k = 0; k < spec_.optimizer_states; ++k) visit(store.optimizer_state(c, k));
  }
}

void Runtime::release(const std::function<void(const void*, std::size_t)>& save, const std::function<void()>& saved) {
  wait_all();
  for_kept_views(*store_, [&](const View& view) { save(view.data, static_cast<std::size_t>(view.size.value)); });
  saved();
  store_.reset();
}

void Runtime::restore(const std::function<void(void*, std::size_t)>& load) {
  check(released(), "only released state is restored");
  make_store(spec_);
  try {
    for_kept_views(*store_, [&](const View& view) { load(view.data, static_cast<std::size_t>(view.size.value)); });
  } catch (...) {
    store_.reset();
    throw;
  }
}

}  // namespace spillway
