// Precompiled for every source that reads LibTorch: its headers cost about half a minute a source file otherwise.
#include <torch/torch.h>
