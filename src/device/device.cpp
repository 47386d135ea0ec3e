// SPDX-License-Identifier: Apache-2.0
#include "spillway/device/device.h"

namespace spillway {

std::string_view to_string(DeviceKind kind) {
  return kind == DeviceKind::cuda ? "cuda" : "emulated";
}

}  // namespace spillway
