// SPDX-License-Identifier: Apache-2.0
// What the small forms of masters and states cost and save: one thread, each form timed in turn with fp32 throughout
// (bf16 gradients in, bf16 copy out in both).
//
// Counters: bytes moved for a parameter, ns for one, and of_fp32: time with fp32 / time with the form, the median over
// rounds.

#include <benchmark/benchmark.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cpu_kernels.h"

namespace {

using namespace spillway::kernels;

double processor_seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// One model, its states in one form.
class Model {
 public:
  Model(const CpuKernels& set, StateFormat format, bool split, std::int64_t count)
      : set_(set),
        size_(static_cast<std::size_t>(count)),
        p_(split ? 0 : size_, 0.5f),
        g_(size_),
        working_(size_),
        low_(split ? size_ : 0) {
    const std::vector<float> values(size_, 0.01f);
    set.narrow(g_.data(), Element::bf16, values.data(), count);
    for (int k = 0; k < 2; ++k) {
      data_[k].resize(size_ * (format == StateFormat::f32 ? 4 : format == StateFormat::bf16 ? 2 : 1));
      scales_[k].resize(format == StateFormat::block8 ? size_ / kBlock + 1 : 0);
      arrays_.states[k] = {format, data_[k].data(), scales_[k].data()};
      set.pack_state(arrays_.states[k], k == 0 ? StateKind::any_sign : StateKind::square, values.data(), count, 0, {});
    }
    arrays_.p = split ? MasterArray{nullptr, working_.data(), low_.data()} : MasterArray{p_.data(), nullptr, nullptr};
    arrays_.g = g_.data();
    arrays_.g_type = Element::bf16;
    arrays_.copy = split ? nullptr : working_.data();
    arrays_.copy_type = split ? Element::none : Element::bf16;
    arrays_.count = count;
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  double update() {
    static const AdamScalars scalars = adam_scalars(1e-4, 0.9, 0.999, 1e-8, 0.01, true, 100, 0.5f);
    const double start = processor_seconds();
    set_.adam_packed(scalars, arrays_);
    return processor_seconds() - start;
  }

 private:
  const CpuKernels& set_;
  std::size_t size_;
  std::vector<float> p_;
  std::vector<std::uint16_t> g_, working_, low_;
  std::vector<std::uint8_t> data_[2];
  std::vector<float> scales_[2];
  UpdateArrays arrays_;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct Form {
  const char* name;
  StateFormat format;
  bool split;
  double bytes;  // read and written for a parameter
};

void run(benchmark::State& state, const CpuKernels& set, const Form& form, std::int64_t count) {
  Model model(set, form.format, form.split, count), fp32(set, StateFormat::f32, false, count);
  std::vector<double> times, ratios;
  for (auto _ : state) {
    times.push_back(model.update());
    state.SetIterationTime(times.back());
    ratios.push_back(fp32.update() / times.back());
  }
  state.counters["bytes_per_param"] = form.bytes;
  state.counters["ns_per_param"] = median(times) / static_cast<double>(count) * 1e9;
  state.counters["of_fp32"] = median(ratios);
}

void add_all() {
  static const Form kForms[] = {{"split", StateFormat::f32, true, 26},
                                {"bf16", StateFormat::bf16, false, 20},
                                {"split_bf16", StateFormat::bf16, true, 18},
                                {"block8", StateFormat::block8, false, 16},
                                {"split_block8", StateFormat::block8, true, 14}};
  for (std::string_view name : cpu_kernel_names()) {
    for (const Form& form : kForms) {
      for (std::int64_t count : {20'000'000, 50'000}) {
        const std::string title = "forms/" + std::string(name) + "/" + form.name + "/" + std::to_string(count);
        const auto body = [set = cpu_kernels(name), form, count](benchmark::State& s) { run(s, *set, form, count); };
        benchmark::RegisterBenchmark(title.c_str(), body)->UseManualTime()->Unit(benchmark::kMillisecond);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  add_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
