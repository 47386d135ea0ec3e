// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace spillway {

/// What the first bytes of a file say it is, in words for a message and with what to do ("a GGUF file; ..."); empty
/// when they are of no format known here.
std::string_view foreign_format(std::span<const std::byte> bytes);

/// As foreign_format, leaving out formats whose mark is so short that ordinary token numbers could spell it.
std::string_view foreign_format_of_tokens(std::span<const std::byte> bytes);

}  // namespace spillway
