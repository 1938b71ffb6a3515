// Small kernels: clusters of points, a sweep of a classical Hopfield network, systematic resampling; and a
// wrapper with which several threads run one kernel.
#include <algorithm>
#include <vector>

#include "frame.hpp"
#include "resampling.hpp"

// ---- clusters: the connected components of points that are at most a radius apart.
//
// The points (count, dimension) are sorted by their first coordinate. From each point, a search looks only at
// points within the radius along that coordinate that no search has reached yet.

#define CLUSTERS_FIELDS(whole, real, place) \
  whole(count) whole(dimension) real(radius) place(const double, points) place(int64_t, label)
EXPTILT_FRAME(Clusters, CLUSTERS_FIELDS)

// Returns the first point at or after i that no search has reached; shortens the path to it in `after`.
static int64_t unreached(int64_t* after, int64_t i) {
  int64_t root = i;
  while (after[root] != root) root = after[root];
  while (after[i] != root) {
    const int64_t next = after[i];
    after[i] = root;
    i = next;
  }
  return root;
}

EXPTILT_KERNEL(clusters, Clusters) {
  const int64_t N = f.count, D = f.dimension;
  const double limit = f.radius * f.radius;
  std::vector<int64_t> queue(N), after(N + 1);  // after[i] = i as long as i has not been reached
  std::vector<double> first(N);
  for (int64_t i = 0; i <= N; ++i) after[i] = i;
  for (int64_t i = 0; i < N; ++i) first[i] = f.points[i * D];
  int64_t found = 0;
  for (int64_t seed = unreached(after.data(), 0); seed < N; seed = unreached(after.data(), seed), ++found) {
    f.label[seed] = found;
    after[seed] = seed + 1;
    queue[0] = seed;
    for (int64_t head = 0, tail = 1; head < tail; ++head) {
      const double* x = f.points + queue[head] * D;
      const int64_t low = std::lower_bound(first.begin(), first.end(), x[0] - f.radius) - first.begin();
      int64_t j = unreached(after.data(), low);
      for (; j < N && first[j] - x[0] <= f.radius; j = unreached(after.data(), j + 1)) {
        const double* y = f.points + j * D;
        double distance = 0.0;
        for (int64_t d = 0; d < D && distance <= limit; ++d) distance += (y[d] - x[d]) * (y[d] - x[d]);
        if (!(distance <= limit)) continue;
        f.label[j] = found;
        after[j] = j + 1;
        queue[tail++] = j;
      }
    }
  }
  return found;
}

// ---- a sweep of a classical Hopfield network: updates every unit of each state (rows, units) once, in a given order.
//
// field = state · weight is kept up to date: testing a unit is one comparison, a flip adds a row of the weights.

#define NETWORK_FIELDS(whole, real, place)                                                      \
  whole(rows) whole(units) real(tie) place(const double, weight) place(const int64_t, order)    \
  place(double, state) place(double, field)
EXPTILT_FRAME(Network, NETWORK_FIELDS)

EXPTILT_KERNEL(network_sweep, Network) {
  const int64_t N = f.units;
  for (int64_t b = 0; b < f.rows; ++b) {
    double *s = f.state + b * N, *h = f.field + b * N;
    for (int64_t k = 0; k < N; ++k) {
      const int64_t i = f.order[k];
      if (!(h[i] * s[i] < -f.tie)) continue;
      s[i] = -s[i];
      const double change = 2.0 * s[i], *row = f.weight + i * N;
      for (int64_t j = 0; j < N; ++j) h[j] += change * row[j];
    }
  }
  return 0;
}

// ---- systematic resampling of weights (rows, count) into ancestors (rows, drawn).

#define RESAMPLING_FIELDS(whole, real, place)                                            \
  whole(rows) whole(count) whole(drawn) place(const double, weight)                      \
  place(const double, start) place(int64_t, ancestor)
EXPTILT_FRAME(Resampling, RESAMPLING_FIELDS)

EXPTILT_KERNEL(resample, Resampling) {
  for (int64_t r = 0; r < f.rows; ++r)
    systematic(f.weight + r * f.count, f.count, f.start[r], f.ancestor + r * f.drawn, f.drawn);
  return 0;
}

// ---- runs a kernel on one of several threads that share its frame: adds the kernel's result to `sum`, or 1 to
// `lacking` if memory ran out.

using Kernel = int64_t(void*);
#define SHARED_FIELDS(whole, real, place) place(Kernel, kernel) place(void, frame) whole(sum) whole(lacking)
EXPTILT_FRAME(Shared, SHARED_FIELDS)

EXPTILT_KERNEL(share, Shared) {
  const int64_t found = f.kernel(f.frame);
  if (found == OUT_OF_MEMORY)
    __atomic_fetch_add(&f.lacking, 1, __ATOMIC_RELAXED);
  else
    __atomic_fetch_add(&f.sum, found, __ATOMIC_RELAXED);
  return 0;
}
