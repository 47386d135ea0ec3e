// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/offload/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "spillway/core/error.h"
#include "spillway/runtime/machine.h"

namespace spillway::bench {
namespace {

constexpr int kUsage = 2;
constexpr std::int64_t kLargestCopy = std::int64_t{4} << 30;

/// The flags as they were given.
struct Flags {
  std::string device = "emulated", bandwidth, model, json;
  std::vector<int> threads;
  std::vector<std::string> sizes;
  double seconds = 0;
  std::int64_t matmul = 0, parameters = 0;
  int compute_threads = 0;
  bool quick = false;
};

void add_flags(CLI::App& app, Flags& f) {
  app.add_option("--device", f.device, "emulated or cuda")
      ->check(CLI::IsMember({"emulated", "cuda"}))
      ->capture_default_str();
  app.add_option("--threads", f.threads, "of the CPU optimizer, for example 1,2,4 [powers of two up to the cores]")
      ->delimiter(',');
  app.add_option("--sizes", f.sizes, "of copies, for example 64KiB,16MiB [64KiB,1MiB,16MiB,64MiB]")->delimiter(',');
  app.add_option("--link-bandwidth", f.bandwidth,
                 "of the emulated device, each way, for example 12GB/s [as fast as memory]");
  app.add_option("--seconds", f.seconds, "a measurement [0.3]")->check(CLI::Range(0.001, 3600.0));
  app.add_option("--matmul", f.matmul, "rows and columns of the product that computes [1024]")
      ->check(CLI::Range(8, 65536));
  app.add_option("--compute-threads", f.compute_threads, "of LibTorch [half the cores]")->check(CLI::Range(1, 4096));
  app.add_option("--parameters", f.parameters, "that the CPU optimizer updates in one go [8388608]")
      ->check(CLI::Range(std::int64_t{1024}, std::int64_t{1} << 34));
  app.add_option("--model", f.model, "config.json of the model whose step is timed [a Llama of 4 million parameters]")
      ->check(CLI::ExistingPath);
  app.add_option("--json", f.json, std::string("file for the results as JSON (schema ") + kSchema + ")");
  app.add_flag("--quick", f.quick, "small and short: to see that it runs, not to measure");
}

ModelConfig small_llama(bool quick) {
  ModelConfig c;
  c.family = ModelFamily::llama;
  c.vocabulary = quick ? 256 : 2048;
  c.hidden = quick ? 64 : 256;
  c.intermediate = quick ? 160 : 688;
  c.layers = quick ? 2 : 4;
  c.heads = quick ? 2 : 8;
  c.kv_heads = quick ? 1 : 4;
  c.head_dim = 32;
  c.max_position = 256;
  return c;
}

std::vector<int> threads_of(const Flags& f, int cores) {
  std::vector<int> out = f.threads;
  for (int t : out) {
    require(t >= 1 && t <= cores, "--threads " + std::to_string(t) + ": expected 1 to " + std::to_string(cores) +
                                      ", the cores that this process may use");
  }
  for (int t = 1; f.threads.empty() && t <= cores; t *= 2) out.push_back(t);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

std::vector<Bytes> sizes_of(const Flags& f) {
  std::vector<std::string> texts = f.sizes;
  if (texts.empty() && f.quick) texts = {"64KiB", "1MiB"};
  if (texts.empty()) texts = {"64KiB", "1MiB", "16MiB", "64MiB"};
  std::vector<Bytes> out;
  for (const std::string& text : texts) {
    const Bytes size = parse_bytes(text);
    require(size.value >= 1 && size.value <= kLargestCopy, "--sizes " + text + ": expected 1 byte to 4GiB");
    out.push_back(size);
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

Options resolve(const Flags& f) {
  const int cores = available_cores();
  Options o;
  o.device.kind = f.device == "cuda" ? DeviceConfig::Kind::cuda : DeviceConfig::Kind::emulated;
  if (!f.bandwidth.empty()) {
    require(f.device == "emulated", "--link-bandwidth models a link: it needs --device emulated");
    o.device.upload_bandwidth = o.device.download_bandwidth = parse_bandwidth(f.bandwidth);
  }
  o.threads = threads_of(f, cores);
  o.sizes = sizes_of(f);
  o.seconds = f.seconds > 0 ? f.seconds : f.quick ? 0.02 : 0.3;
  o.rounds = f.quick ? 1 : 5;
  o.matmul = f.matmul > 0 ? f.matmul : f.quick ? 128 : 1024;
  o.compute_threads = f.compute_threads > 0 ? f.compute_threads : std::max(1, cores / 2);
  o.parameters = f.parameters > 0 ? f.parameters : std::int64_t{1} << (f.quick ? 16 : 23);
  o.model = f.model.empty() ? small_llama(f.quick) : ModelConfig::load(f.model);
  o.batch = f.quick ? 1 : 2;
  o.length = std::min<std::int64_t>(f.quick ? 16 : 128, o.model.max_position);
  o.json = f.json;
  if (!o.json.empty() && !std::ofstream(o.json, std::ios::app)) {
    throw FileError("--json " + o.json + ": cannot write there");
  }
  return o;
}

}  // namespace

std::optional<Options> parse_options(int argc, char** argv, int& exit_code) {
  CLI::App app("Measures what this machine can offload: copies, the optimizer on the CPU, what they cost each other.");
  Flags flags;
  add_flags(app, flags);
  try {
    app.parse(argc, argv);
    return resolve(flags);
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error) == 0 ? 0 : kUsage;
  } catch (const Error& error) {
    std::fprintf(stderr, "offload_bench: %s\n", error.what());
    exit_code = kUsage;
  }
  return std::nullopt;
}

}  // namespace spillway::bench
