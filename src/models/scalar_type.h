// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include "spillway/core/dtype.h"
#include "spillway/core/error.h"

namespace spillway {

/// LibTorch's name of a working type. Throws: InvalidArgument for others than fp32, bf16, fp16.
inline torch::ScalarType to_scalar_type(DType type) {
  switch (type) {
    case DType::f32:
      return torch::kFloat;
    case DType::bf16:
      return torch::kBFloat16;
    case DType::f16:
      return torch::kHalf;
    default:
      throw InvalidArgument("A model's parameters can be fp32, bf16 or fp16, not " + std::string(to_string(type)) +
                            ".");
  }
}

/// The inverse. Throws: InvalidArgument for a type that is none of these.
inline DType from_scalar_type(torch::ScalarType type) {
  if (type == torch::kFloat) return DType::f32;
  if (type == torch::kBFloat16) return DType::bf16;
  if (type == torch::kHalf) return DType::f16;
  throw InvalidArgument(std::string("A model's parameters can be fp32, bf16 or fp16, not ") + c10::toString(type) +
                        ".");
}

}  // namespace spillway
