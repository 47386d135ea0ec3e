// SPDX-License-Identifier: Apache-2.0
#pragma once

// Precompiled for every source that reads LibTorch: its headers cost about half a minute a source file otherwise.
#include <torch/torch.h>
