// SPDX-License-Identifier: Apache-2.0
// How fast ranks move and sum data, beside what the transport moves at all, and what the ordered sum costs.
//
// Started by mpirun or srun, the ranks are its processes; else they are threads of this one.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <thread>

#include "kernels/cpu_kernels.h"
#include "spillway/comm/launch.h"
#include "spillway/comm/transports.h"
#include "spillway/core/error.h"

namespace spillway::bench {
namespace {

struct Options {
  int ranks = 2;
  int repeats = 7;
  std::vector<std::string> sizes = {"64KiB", "1MiB", "16MiB", "64MiB"};
  std::string type = "bf16";
};

// What one rank works with at one size: `count` elements, of which each rank owns an equal part.
class Bench {
 public:
  Bench(Communicator& comm, DType type, Bytes bytes, int repeats)
      : comm_(comm), type_(type), repeats_(repeats), n_(static_cast<std::size_t>(comm.size())) {
    part_ = bytes.value / size_of(type) / comm.size();
    whole_.resize(static_cast<std::size_t>(part_ * size_of(type)) * n_);
    pieces_.resize(whole_.size());
    sum_.resize(static_cast<std::size_t>(part_));
    counts_.assign(n_, part_);
    shards_.assign(n_, {part_ * size_of(type)});
  }

  double bytes() const { return static_cast<double>(whole_.size()); }

  /// Seconds of the slowest rank, the median of the repeats.
  double time(const std::function<void()>& body) {
    std::vector<double> seconds;
    for (int i = 0; i <= repeats_; ++i) {
      comm_.barrier({"start"});
      const auto begin = std::chrono::steady_clock::now();
      body();
      const double mine = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      const std::vector<double> all = comm_.gather_all({"times"}, mine);
      if (i > 0) seconds.push_back(*std::max_element(all.begin(), all.end()));  // the first warms up
    }
    std::nth_element(seconds.begin(), seconds.begin() + repeats_ / 2, seconds.end());
    return seconds[static_cast<std::size_t>(repeats_ / 2)];
  }

  /// The transport's limit: every rank sends (n-1)/n of the bytes to its neighbour and gets as much.
  void copy() {
    const Bytes some{static_cast<std::int64_t>(whole_.size() - whole_.size() / n_)};
    const Send send{whole_.data(), some, (comm_.rank() + 1) % comm_.size()};
    const Receive receive{pieces_.data(), some, (comm_.rank() + comm_.size() - 1) % comm_.size()};
    comm_.exchange({"copy"}, {&send, 1}, {&receive, 1});
  }
  void all_gather() {
    const GatherChunk chunk{at(whole_, comm_.rank()), whole_.data(), shards_};
    comm_.all_gather({"gather"}, {&chunk, 1});
  }
  void reduce_scatter() {
    const ScatterChunk chunk{whole_.data(), pieces_.data(), counts_};
    comm_.reduce_scatter({"scatter"}, {&chunk, 1}, type_);
  }
  void all_reduce() {
    const SumRun run{whole_.data(), part_ * comm_.size()};
    comm_.all_reduce({"sum"}, {&run, 1}, type_);
  }
  /// Pieces to their owner, who adds them in fp32 in the order of the ranks.
  void ordered_sum() {
    std::vector<Send> sends;
    std::vector<Receive> receives;
    for (int other = 0; other < comm_.size(); ++other) {
      sends.push_back({at(whole_, other), shards_[0], other});
      receives.push_back({at(pieces_, other), shards_[0], other});
    }
    comm_.exchange({"pieces"}, sends, receives);
    const kernels::CpuKernels& cpu = kernels::cpu_kernels();
    const kernels::Element element = type_ == DType::f32    ? kernels::Element::f32
                                     : type_ == DType::bf16 ? kernels::Element::bf16
                                                            : kernels::Element::f16;
    cpu.widen(sum_.data(), at(pieces_, 0), element, part_);
    for (int other = 1; other < comm_.size(); ++other) cpu.accumulate(sum_.data(), at(pieces_, other), element, part_);
  }

 private:
  std::byte* at(std::vector<std::byte>& buffer, int rank) const {
    return buffer.data() + part_ * size_of(type_) * rank;
  }

  Communicator& comm_;
  const DType type_;
  const int repeats_;
  const std::size_t n_;
  std::int64_t part_ = 0;
  std::vector<std::byte> whole_, pieces_;
  std::vector<float> sum_;
  std::vector<std::int64_t> counts_;
  std::vector<Bytes> shards_;
};

void run(Communicator& comm, const Options& options) {
  const DType type = parse_dtype(options.type).value_or(DType::u8);
  require(type == DType::f32 || type == DType::bf16 || type == DType::f16,
          fmt::format("--type is {}; expected fp32, bf16 or fp16", options.type));
  const double n = comm.size();
  const auto say = [&](const std::string& line) {
    if (comm.rank() == 0) std::cout << line << std::endl;
  };
  say(fmt::format("{} ranks ({}), {}; bus bandwidth: bytes / time x (n-1)/n, for all_reduce x 2(n-1)/n", comm.size(),
                  comm.transport(), options.type));
  say(fmt::format("{:>10}  {:<15} {:>10} {:>10} {:>10} {:>9}", "bytes", "call", "ms", "alg GB/s", "bus GB/s",
                  "of limit"));
  for (const std::string& size : options.sizes) {
    Bench bench(comm, type, parse_bytes(size), options.repeats);
    double limit = 0;
    const auto row = [&](const char* name, double factor, const std::function<void()>& body) {
      const double seconds = bench.time(body), algorithm = bench.bytes() / seconds / 1e9;
      if (limit == 0) limit = algorithm * factor;
      say(fmt::format("{:>10}  {:<15} {:>10.3f} {:>10.3f} {:>10.3f} {:>8.0f}%", size, name, seconds * 1e3, algorithm,
                      algorithm * factor, 100 * algorithm * factor / limit));
      return seconds;
    };
    const double share = (n - 1) / n;
    row("copy (limit)", share, [&] { bench.copy(); });
    row("all_gather", share, [&] { bench.all_gather(); });
    row("all_reduce", 2 * share, [&] { bench.all_reduce(); });
    const double own = row("reduce_scatter", share, [&] { bench.reduce_scatter(); });
    const double ordered = row("ordered sum", share, [&] { bench.ordered_sum(); });
    say(fmt::format("{:>10}  the ordered sum takes {:.2f} times the transport's own reduce_scatter", size,
                    ordered / own));
  }
}

void run_threads(const Options& options) {
  auto ranks = make_thread_ranks(options.ranks);
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(ranks.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        run(*ranks[i], options);
      } catch (const std::exception& error) {
        errors[i] = std::current_exception();
        ranks[i]->fail(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) {
  using namespace spillway;
  bench::Options options;
  CLI::App app("How fast ranks move and sum data");
  app.add_option("--ranks", options.ranks, "ranks as threads, where no launcher started this program")
      ->check(CLI::Range(2, 256));
  app.add_option("--sizes", options.sizes, "bytes of the whole, with units")->delimiter(',');
  app.add_option("--type", options.type, "fp32, bf16 or fp16");
  app.add_option("--repeats", options.repeats, "the median of so many")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    const Launch launch = read_launch(launch_variables());
    if (launch.size == 1) {
      bench::run_threads(options);
    } else {
      bench::run(*make_host_communicator(launch), options);
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "collective_bench: " << error.what() << std::endl;
    return 1;
  }
}
