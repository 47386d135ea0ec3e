// SPDX-License-Identifier: Apache-2.0
//
// finetune --save-every, --keep, --resume.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "finetune.h"
#include "spillway/core/error.h"
#include "spillway/formats/token_file.h"
#include "spillway/state/checkpoint_folder.h"

namespace finetune {
namespace {

// Tells other data of as many rows, or another mask: of a large file some rows alone, evenly spread (FNV-1a).
std::uint64_t checksum(const spillway::TokenFile& data) {
  constexpr std::int64_t kRows = 64, kAnyVocabulary = std::int64_t{1} << 32;
  std::vector<std::int64_t> inputs(static_cast<std::size_t>(data.length())), targets(inputs.size());
  std::uint64_t sum = 14695981039346656037ULL;
  for (std::int64_t row = 0; row < data.rows(); row += std::max<std::int64_t>(1, data.rows() / kRows)) {
    data.read(row, kAnyVocabulary, inputs, targets);
    for (const auto* values : {&inputs, &targets}) {
      for (const std::int64_t value : *values) sum = (sum ^ static_cast<std::uint64_t>(value)) * 1099511628211ULL;
    }
  }
  return sum;
}

std::string what_is_left(const std::filesystem::path& folder) {
  const auto complete = spillway::list_checkpoints(folder);
  if (complete.empty()) return "there is no complete checkpoint yet";
  return "the last complete checkpoint is " + complete.back().string() +
         ": once what is named here is mended (a full disk: with room for two checkpoints), go on with --resume";
}

// What a run can go on from where its newest checkpoint is refused.
std::string what_is_before(const std::filesystem::path& folder) {
  const auto complete = spillway::list_checkpoints(folder);
  if (complete.size() < 2) return {};
  try {
    const auto& newest = complete.back();
    spillway::check_checkpoint_files(newest, spillway::read_checkpoint_manifest(newest), /*checksums=*/true);
    return {};  // whole, and of another run
  } catch (const spillway::FileError&) {
  }
  return "; the one before is " + complete[complete.size() - 2].filename().string() + ": to go on from it, move " +
         complete.back().filename().string() + " away";
}

std::filesystem::path folder_of(const Options& o) {
  return o.checkpoints.empty() ? std::filesystem::path(o.output) / "checkpoints" : std::filesystem::path(o.checkpoints);
}

}  // namespace

void require_checkpoints_of_its_own(const Options& o) {
  if (o.resume) return;
  const std::filesystem::path folder = folder_of(o);
  const auto earlier = spillway::list_checkpoints(folder);
  spillway::require(earlier.empty(), folder.string() + " holds checkpoints of an earlier run (the newest is " +
                                         (earlier.empty() ? "" : earlier.back().filename().string()) +
                                         "): go on with it (--resume), keep this run's elsewhere (--checkpoints, or "
                                         "another --output), or remove them");
}

Checkpoints::Checkpoints(const Options& options, spillway::Engine& engine, const spillway::TokenFile& data,
                         spillway::DataLoader& loader)
    : options_(options),
      engine_(engine),
      loader_(loader),
      data_checksum_(checksum(data)),
      folder_(folder_of(options)) {}

// What decides which rows come next, and what tensors do not say: a resumed run must agree in all but the position.
std::string Checkpoints::position(std::int64_t step) const {
  nlohmann::json out = {{"steps_done", step},
                        {"data_position", loader_.position()},
                        {"data_rows", loader_.rows()},
                        {"data_checksum", data_checksum_},
                        {"shuffle", !options_.no_shuffle},
                        {"seed", options_.seed}};
  if (const auto lora = lora_options(options_.lora)) out["lora_scale"] = lora->scaling();
  return out.dump();
}

std::int64_t Checkpoints::resume() {
  if (!options_.resume) return 0;
  if (spillway::list_checkpoints(folder_).empty()) {
    std::printf("nothing to resume in %s: starting from the beginning\n", folder_.string().c_str());
    return 0;
  }
  std::string text;
  try {
    text = engine_.load(folder_);
  } catch (const spillway::FileError& error) {
    throw spillway::FileError(error.what() + what_is_before(folder_));
  }
  // A stranger's may be nested as deep as no reader of it can go.
  const nlohmann::json saved = nlohmann::json::parse(
      text, [](int depth, nlohmann::json::parse_event_t, nlohmann::json&) { return depth <= 2; }, false);
  const nlohmann::json here = nlohmann::json::parse(position(0));
  for (const char* key : {"steps_done", "data_position"}) {
    spillway::require(saved.is_object() && saved.contains(key) && saved[key].is_number_unsigned() &&
                          saved[key].get<std::uint64_t>() >> 62 == 0,
                      folder_.string() + ": the newest checkpoint was not saved by finetune");
  }
  for (const char* key : {"data_rows", "data_checksum", "shuffle", "seed", "lora_scale"}) {
    const nlohmann::json before = saved.value(key, nlohmann::json()), now = here.value(key, nlohmann::json());
    spillway::require(before == now, "--resume: the checkpoint was made with " + std::string(key) + " " +
                                         before.dump() + ", this run has " + now.dump());
  }
  loader_.seek(saved["data_position"].get<std::int64_t>());
  saved_ = saved["steps_done"].get<std::int64_t>();
  std::printf("resumed after step %lld\n", static_cast<long long>(saved_));
  return saved_;
}

void Checkpoints::save(std::int64_t step, bool now) {
  const bool due = options_.save_every > 0 && step % options_.save_every == 0;
  if ((!due && !now) || step == saved_) return;
  spillway::CheckpointOptions how;
  how.keep = options_.keep;
  how.program = position(step);
  int shown = -1;  // in tenths
  how.progress = [&](spillway::Bytes done, spillway::Bytes total) {
    const int tenth = static_cast<int>(10.0 * static_cast<double>(done.value) / static_cast<double>(total.value));
    if (tenth == shown || total.value < (std::int64_t{1} << 30)) return;  // a second's work needs no progress
    shown = tenth;
    std::printf("saving: %d %% of %s\n", 10 * tenth, spillway::to_string(total).c_str());
    std::fflush(stdout);
  };
  std::filesystem::path made;
  try {
    made = engine_.save(folder_, how);
  } catch (const spillway::FileError& error) {
    throw spillway::FileError(std::string(error.what()) + "; " + what_is_left(folder_));
  }
  saved_ = step;
  std::printf("checkpoint %s\n", made.string().c_str());
  std::fflush(stdout);
}

void Checkpoints::rescue(std::int64_t step) noexcept {
  try {
    save(step, true);
    std::fprintf(stderr, "finetune: what was trained is in %s: once what is named below is mended, --resume saves it\n",
                 folder_.string().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "finetune: what was trained cannot be kept in a checkpoint either: %s\n", error.what());
  }
}

}  // namespace finetune
