// SPDX-License-Identifier: Apache-2.0
//
// Reading and setting whole states by parameter, rules in place of the optimizer, release and restore of all pools.
#include <algorithm>
#include <utility>
#include <vector>

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

void Runtime::wait_copy(void* to, const void* from, Bytes bytes) {
  machine_.wait(machine_.compute().submit(
      {"copy of state",
       -1,
       OpKind::copy,
       static_cast<double>(bytes.value),
       {},
       [&work = machine_.device_work(), to, from, bytes](StreamRef stream) { work.copy(stream, to, from, bytes); }}));
}

void Runtime::wait_read(void* to, const View& from) {
  if (!host_reads(from)) return wait_copy(to, from.data, from.size);
  cpu_work().copy({}, to, from.data, from.size);
}

void Runtime::wait_write(const View& to, const void* from) {
  if (!host_reads(to)) return wait_copy(to.data, from, to.size);
  cpu_work().copy({}, to.data, from, to.size);
}

void Runtime::wait_write_rounded(const View& to, DType type, const float* values) {
  if (type == DType::f32) return wait_write(to, values);
  std::vector<std::byte> rounded(static_cast<std::size_t>(to.size.value));
  cpu_work().narrow({}, rounded.data(), element_of(type), values, to.size.value / size_of(type));
  wait_write(to, rounded.data());
}

void Runtime::load_masters(std::int64_t parameter) {
  wait_all();
  const std::int64_t size = size_of(spec_.working);
  std::vector<std::byte> rounded;
  std::vector<float> values;
  for (const Segment& segment : layout_.kept_segments_of_parameter(parameter)) {
    const View working = store_->working(segment.chunk), master = store_->master(segment.chunk);
    if (master_is_working(segment.chunk) || working.data == nullptr) continue;  // null: a virtual machine's
    const std::int64_t at = kept_begin(segment.chunk) + segment.chunk_offset;
    rounded.resize(static_cast<std::size_t>(segment.count * size));
    values.resize(static_cast<std::size_t>(segment.count));
    wait_read(rounded.data(), working.slice({at * size}, {segment.count * size}));
    cpu_work().widen({}, values.data(), rounded.data(), element_of(spec_.working), segment.count);
    wait_write(master.slice({segment.chunk_offset * 4}, {segment.count * 4}), values.data());
  }
}

void Runtime::check_ranks_added() const {
  if (!spec_.reduce_last || ranks_added_) return;
  throw StateError(
      "gradients that ranks add in the last micro-batch only are read and set between that backward and step(), and "
      "backward has to be told that it is the last");
}

void Runtime::read_part(StateRole role, const Segment& kept, float* values) {
  if (role.kind == StateRole::Kind::gradient) check_ranks_added();
  wait_all();
  const DType type = role.kind == StateRole::Kind::gradient ? spec_.gradient : DType::f32;
  const View part = part_of(*store_, role, kept);
  if (part.data == nullptr) return;  // a virtual machine's
  if (type == DType::f32) return wait_read(values, part);
  std::vector<std::byte> rounded(static_cast<std::size_t>(part.size.value));
  wait_read(rounded.data(), part);
  cpu_work().widen({}, values, rounded.data(), element_of(type), kept.count);
}

void Runtime::write_part(StateRole role, const Segment& kept, const float* values) {
  wait_all();
  const bool gradient = role.kind == StateRole::Kind::gradient;
  if (gradient) check_ranks_added();
  if (gradient) note_gradient(kept);
  const View part = part_of(*store_, role, kept);
  if (part.data != nullptr) wait_write_rounded(part, gradient ? spec_.gradient : DType::f32, values);
}

void Runtime::read(StateRole role, std::int64_t parameter, float* values) {
  if (role.kind == StateRole::Kind::gradient) check_ranks_added();  // on ranks that keep nothing of it too
  for (const Segment& segment : layout_.kept_segments_of_parameter(parameter)) {
    read_part(role, segment, values + segment.parameter_offset);
  }
  if (layout_.partition().cuts()) gather_values(parameter, values);
}

void Runtime::write(StateRole role, std::int64_t parameter, const float* values) {
  if (role.kind == StateRole::Kind::gradient) check_ranks_added();
  wait_all();  // here too: a rank that keeps nothing of the parameter has no part to write
  if (role.kind == StateRole::Kind::gradient) parameters_[static_cast<std::size_t>(parameter)].has_gradient = true;
  for (const Segment& segment : layout_.kept_segments_of_parameter(parameter)) {
    write_part(role, segment, values + segment.parameter_offset);
  }
  if (role.kind != StateRole::Kind::master) return;
  const std::int64_t size = size_of(spec_.working);
  for (const Segment& segment : layout_.parameter_segments(parameter)) {
    const View working = store_->working(segment.chunk);
    if (working.data == nullptr) continue;
    wait_write_rounded(working.slice({segment.chunk_offset * size}, {segment.count * size}), spec_.working,
                       values + segment.parameter_offset);
  }
}

void Runtime::set_update_rule(std::int64_t parameter, UpdateRule rule) {
  const ParameterInfo& info = layout_.parameters()[static_cast<std::size_t>(parameter)];
  require(!layout_.partition().cuts(),
          fmt::format("{} has an update rule of its own, which needs its whole state on every rank: use stage 0",
                      info.name));
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
    if (!master_is_working(c)) visit(store.master(c));
    for (std::int64_t k = 0; k < spec_.optimizer_states; ++k) visit(store.optimizer_state(c, k));
  }
}

void Runtime::release(const std::function<void(const void*, std::size_t)>& save, const std::function<void()>& saved) {
  wait_all();
  std::vector<std::byte> fetched;
  for_kept_views(*store_, [&](const View& view) {
    const auto bytes = static_cast<std::size_t>(view.size.value);
    if (host_reads(view)) return save(view.data, bytes);
    fetched.resize(bytes);
    wait_read(fetched.data(), view);
    save(fetched.data(), bytes);
  });
  saved();
  store_.reset();
}

void Runtime::restore(const std::function<void(void*, std::size_t)>& load) {
  check(released(), "only released state is restored");
  make_store(spec_);
  try {
    std::vector<std::byte> loaded;
    for_kept_views(*store_, [&](const View& view) {
      const auto bytes = static_cast<std::size_t>(view.size.value);
      if (host_reads(view)) return load(view.data, bytes);
      loaded.resize(bytes);
      load(loaded.data(), bytes);
      wait_write(view, loaded.data());
    });
  } catch (...) {
    store_.reset();
    throw;
  }
}

}  // namespace spillway
