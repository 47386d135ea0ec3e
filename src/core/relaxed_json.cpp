// SPDX-License-Identifier: Apache-2.0
#include "core/relaxed_json.h"

#include <algorithm>
#include <optional>

#include "core/strict_json.h"

namespace spillway {
namespace {

// The end of the string that begins at `begin`, or of the text.
std::size_t end_of_string(std::string_view text, std::size_t begin) {
  for (std::size_t i = begin + 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      return i + 1;
    }
  }
  return text.size();
}

// The end of the comment that begins at `begin`; `begin` where none does.
std::size_t end_of_comment(std::string_view text, std::size_t begin) {
  const std::string_view rest = text.substr(begin);
  if (rest.starts_with("#") || rest.starts_with("//")) return std::min(text.find('\n', begin), text.size());
  if (!rest.starts_with("/*")) return begin;
  const std::size_t end = text.find("*/", begin + 2);
  if (end == std::string_view::npos) throw JsonFault("a comment that begins with /* does not end");
  return end + 2;
}

void blank(std::string& text, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    if (text[i] != '\n') text[i] = ' ';
  }
}

bool is_space(char c) {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

}  // namespace

std::string relaxed_json(std::string_view text) {
  std::string out(text);
  std::optional<std::size_t> comma;  // with only spaces and comments since
  char before_comma = '{';
  char last = '{';
  for (std::size_t i = 0; i < text.size();) {
    if (const std::size_t end = end_of_comment(text, i); end != i) {
      blank(out, i, end);
      i = end;
      continue;
    }
    const char c = text[i];
    const std::size_t next = c == '"' ? end_of_string(text, i) : i + 1;
    if (!is_space(c)) {
      // "[,]" stays wrong: a comma follows a value.
      const bool closes = c == '}' || c == ']';
      if (closes && comma && std::string_view("{[,:").find(before_comma) == std::string_view::npos) out[*comma] = ' ';
      comma.reset();
      if (c == ',') {
        comma = i;
        before_comma = last;
      }
      last = c;
    }
    i = next;
  }
  return out;
}

}  // namespace spillway
