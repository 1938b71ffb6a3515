// Random numbers, and one line for each comparison.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

// Uniform in (0, 1), by a linear congruential generator, so that every machine draws the same; nearly normal.
inline double uniform() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (double(state >> 11) + 0.5) / 9007199254740992.0;
}
inline double normal() {
  double sum = -6;
  for (int i = 0; i < 12; ++i) sum += uniform();
  return sum;
}

// Prints the largest error in units of the largest number (at least 0.1), and returns whether it is small
// enough. Infinities must be the same, and nothing may be NaN.
inline bool judge(const std::string& problem, const std::string& what, const std::vector<double>& expected,
                  const std::vector<double>& found, double tolerance) {
  double worst = expected.size() == found.size() ? 0 : INFINITY, size = 0.1;
  for (double x : expected)
    if (std::isfinite(x)) size = std::max(size, std::fabs(x));
  for (size_t i = 0; i < std::min(expected.size(), found.size()); ++i) {
    const double error = expected[i] == found[i] ? 0 : std::fabs(expected[i] - found[i]);
    worst = error <= INFINITY ? std::max(worst, error / size) : INFINITY;
  }
  const bool right = worst <= tolerance;
  std::printf("%s %s: %s, error %.2g of at most %.2g\n", right ? "right" : "WRONG", problem.c_str(),
              what.c_str(), worst, tolerance);
  return right;
}
