// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

namespace spillway {

/// Where a check stands in the source. clang 14 lacks std::source_location with this standard library, and nvcc's C++17
/// has none at all; the builtins exist in all three.
struct SourceLocation {
  const char* file = "";
  int line = 0;

  static constexpr SourceLocation current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

/// The base of everything Spillway throws. The message says what was asked, what was there, and what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A caller's mistake: an argument, a configuration key, a combination that is not supported.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// A file that is missing, unreadable, truncated, or not what its name says. Names the file.
class FileError : public Error {
 public:
  using Error::Error;
};

/// A call in a state that does not allow it: step() without a backward, an engine after a failure.
class StateError : public Error {
 public:
  using Error::Error;
};

/// A tier cannot hold what was asked of it. Nothing was allocated.
class OutOfMemory : public Error {
 public:
  /// Units: bytes. `missing` is how many more the tier would need.
  OutOfMemory(const std::string& message, std::int64_t requested, std::int64_t missing)
      : Error(message), requested_(requested), missing_(missing) {}

  std::int64_t requested() const { return requested_; }
  std::int64_t missing() const { return missing_; }

 private:
  std::int64_t requested_;
  std::int64_t missing_;
};

/// What the device reported: a launch that was refused, a fault in work that was given to it before, a lost GPU. Its
/// contents are worth nothing afterwards.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// Ranks of one run that disagree about what to do, or one that failed, ended or does not answer. Names both sides.
class RankError : public Error {
 public:
  using Error::Error;
};

/// Checks what a caller passed. Throws: InvalidArgument with `message` as it stands.
inline void require(bool condition, const std::string& message) {
  if (!condition) throw InvalidArgument(message);
}
inline void require(bool condition, const char* message) {
  if (!condition) throw InvalidArgument(message);
}

/// Thrown by `check`: a fault of Spillway's own, never of its user.
class InternalError : public Error {
 public:
  using Error::Error;
};

/// Checks what Spillway itself must keep true; on in release builds. Throws: InternalError with the place in the
/// source.
inline void check(bool condition, const char* what, SourceLocation where = SourceLocation::current()) {
  if (!condition) {
    throw InternalError(std::string("Spillway's own check failed: ") + what + " (" + where.file + ":" +
                        std::to_string(where.line) + "); please report it");
  }
}

}  // namespace spillway
