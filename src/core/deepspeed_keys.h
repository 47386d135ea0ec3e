// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace spillway {

/// What becomes of a key of a DeepSpeed configuration that nothing here reads.
enum class DeepSpeedKey {
  read,                // it has a meaning here
  without_effect,      // it cannot change what is computed: named in the warning
  refused_if_on,       // it would change what is computed, unless it says no
  refused_if_enabled,  // the same, and off where it does not say "enabled"
};

struct DeepSpeedKeyRule {
  const char* section;  // "" for the top, else the key of the section, with dots
  const char* key;
  DeepSpeedKey rule;
  const char* instead;  // where refused: what to do
};

/// The rule of a key; none where no key has that name.
const DeepSpeedKeyRule* find_deepspeed_key(std::string_view section, std::string_view key);

std::vector<std::string> deepspeed_keys(std::string_view section);

/// Whether a value turns on what its key names: not false, 0, null, "none", or an object whose "enabled" says no or,
/// where it has none, whose members are all off. Ranks of one way of dividing a model (a member "..._size" of 1) divide
/// nothing.
bool is_on(const nlohmann::json& value);
/// The same for a section that is off until its "enabled" says yes.
bool is_enabled(const nlohmann::json& value);

}  // namespace spillway
