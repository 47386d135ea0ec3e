// SPDX-License-Identifier: Apache-2.0
#include "comm/store_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/patience.h"
#include "spillway/core/error.h"
#include "spillway/core/log.h"

namespace spillway {
namespace {

constexpr char kHeaders = 'h', kValues = 'v';
constexpr std::int64_t kLastGoodbye = 10'000'000'000;  // ns that rank 0 stays for the others

CallHeader header_in(const std::vector<std::byte>& bytes, std::size_t index) {
  CallHeader header;
  if (bytes.size() < (index + 1) * sizeof(header)) throw RankError("a rank of another version of Spillway takes part");
  std::memcpy(&header, bytes.data() + index * sizeof(header), sizeof(header));
  return header;
}

}  // namespace

std::string next_prefix(Store& store, const Launch& launch) {
  const std::string counter = fmt::format("spillway/{}/made/{}", launch.attempt, launch.rank);
  std::uint64_t made = 0;
  if (const auto before = store.find(counter); before && before->size() == sizeof(made))
    std::memcpy(&made, before->data(), sizeof(made));
  const std::uint64_t now = made + 1;
  store.set(counter, std::as_bytes(std::span(&now, 1)));
  return fmt::format("spillway/{}/{}", launch.attempt, made);
}

StoreCommunicator::StoreCommunicator(Place place, Store& store, std::string prefix, const CommOptions& options)
    : CheckedCommunicator(place, options), store_(store), prefix_(std::move(prefix) + "/") {}

std::string StoreCommunicator::key(Channel channel, std::int64_t sequence, char phase, int rank) const {
  return fmt::format("{}{}/{}/{}/{}", prefix_, static_cast<int>(channel), sequence, phase, rank);
}

void StoreCommunicator::require_no_failure(Channel channel) {
  throw_if_failed();
  if (const auto found = store_.find(key("failed"))) require_agreement(current(channel), header_in(*found, 0), channel);
}

std::string StoreCommunicator::announced_failure() {
  const auto found = store_.find(key("failed"));
  if (!found) return {};
  const CallHeader theirs = header_in(*found, 0);
  return fmt::format("rank {} failed: {}", theirs.rank, theirs.note.data());
}

template <class Taken>
void StoreCommunicator::wait_for_all(Channel channel, char phase, const Taken& taken) {
  std::vector<int> missing;
  for (int other = 0; other < size(); ++other) {
    if (other != rank()) missing.push_back(other);
  }
  const std::int64_t since = steady_ns(), limit = static_cast<std::int64_t>(options().timeout.value * 1e9);
  Patience patience;
  while (true) {
    std::erase_if(missing, [&](int other) {
      const auto value = store_.find(key(channel, current(channel).sequence, phase, other));
      if (value) taken(static_cast<std::size_t>(other), *value);
      return value.has_value();
    });
    if (missing.empty()) return;
    require_no_failure(channel);
    if (steady_ns() - since > limit) throw_timeout(channel, missing, since);
    patience.pause();
  }
}

void StoreCommunicator::swap(Channel channel, std::span<const CallHeader> out, std::span<CallHeader> in) {
  const std::int64_t sequence = current(channel).sequence;
  store_.set(key(channel, sequence, kHeaders, rank()), std::as_bytes(out));
  const auto self = static_cast<std::size_t>(rank());
  wait_for_all(channel, kHeaders, [&](std::size_t other, const std::vector<std::byte>& value) {
    in[other] = header_in(value, self);
    require_agreement(out[other], in[other], channel);
  });
  // All have come to this call, so all have read what belonged to the one before.
  if (sequence > 0) {
    for (const char phase : {kHeaders, kValues}) store_.erase(key(channel, sequence - 1, phase, rank()));
  }
}

void StoreCommunicator::gather_small(Channel channel, std::span<const std::byte> mine, std::span<std::byte> all) {
  const auto place = [&](std::size_t rank) { return all.begin() + static_cast<std::ptrdiff_t>(rank * mine.size()); };
  std::copy(mine.begin(), mine.end(), place(static_cast<std::size_t>(rank())));
  store_.set(key(channel, current(channel).sequence, kValues, rank()), mine);
  wait_for_all(channel, kValues, [&](std::size_t other, const std::vector<std::byte>& value) {
    check(value.size() == mine.size(), "ranks agreed on the size of a small exchange");
    std::copy(value.begin(), value.end(), place(other));
  });
}

std::vector<std::byte> StoreCommunicator::share(const std::string& name, std::span<const std::byte> of_rank_0) {
  if (rank() == 0) {
    store_.set(key(name), of_rank_0);
    return {of_rank_0.begin(), of_rank_0.end()};
  }
  const std::int64_t since = steady_ns(), limit = static_cast<std::int64_t>(options().timeout.value * 1e9);
  Patience patience;
  while (true) {
    if (auto value = store_.find(key(name))) return *std::move(value);
    throw_if_failed();
    if (const std::string why = announced_failure(); !why.empty()) throw RankError(why);
    if (steady_ns() - since > limit) {
      throw RankError(
          fmt::format("rank {} of {} has waited {} s for {} of rank 0", rank(), size(), options().timeout.value, name));
    }
    patience.pause();
  }
}

void StoreCommunicator::announce_failure(const std::string& why) noexcept {
  try {
    CallHeader header;
    header.kind = CallKind::failed;
    header.rank = rank();
    set_text(header.note, why);
    store_.set(key("failed"), std::as_bytes(std::span(&header, 1)));
  } catch (const std::exception&) {  // the store has gone, as the others see too
  }
}

bool StoreCommunicator::end_together() noexcept {
  if (!end_orderly()) return false;
  try {
    agree_to_end(Channel::host);
    if (rank() != 0) {
      store_.set(key(fmt::format("left/{}", rank())), {});
      return true;
    }
    const std::int64_t since = steady_ns();
    Patience patience;
    for (int other = 1; other < size(); ++other) {
      while (!store_.find(key(fmt::format("left/{}", other))) && steady_ns() - since < kLastGoodbye) patience.pause();
    }
    return true;
  } catch (const std::exception& error) {
    fail(error.what());
    log({}, LogLevel::error, error.what());
    return false;
  }
}

}  // namespace spillway
