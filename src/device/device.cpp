// SPDX-License-Identifier: Apache-2.0
#include "spillway/device/device.h"

namespace spillway {

std::string_view to_string(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::emulated:
      return "emulated";
    case DeviceKind::cuda:
      return "cuda";
    case DeviceKind::virtual_device:
      return "virtual";
  }
  return "unknown";
}

}  // namespace spillway
