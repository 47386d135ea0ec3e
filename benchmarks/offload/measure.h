// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace spillway::bench {

/// What repeated measurements say: the middle and how far they lie apart.
struct Spread {
  double median = 0, q25 = 0, q75 = 0, min = 0, max = 0;
  std::int64_t samples = 0;
};
/// Throws: InvalidArgument for none.
Spread spread_of(std::vector<double> values);

/// Something that is done over and over.
struct Activity {
  std::string name;
  std::function<void()> begin = {};  // once, on the thread that does it; may be empty
  std::function<void()> once;        // one operation; returns when it, or the one before it, is done
  std::function<void()> end = {};    // when nothing more follows: waits for what is under way; may be empty
};

/// Does all activities at once, each on a thread of its own, for about `seconds`, and returns for each the seconds of
/// an operation: one number a window of a fifth of that time, its length over the operations in it. So what an
/// operation waits for a core or a lane counts, also where most do not wait. The first operations are left out (until
/// every activity has warmed up), and what one does after another has ended. Blocks: for at least `seconds` and a few
/// operations of each. Throws: the first error of an activity.
std::vector<std::vector<double>> run_together(const std::vector<Activity>& activities, double seconds);

}  // namespace spillway::bench
