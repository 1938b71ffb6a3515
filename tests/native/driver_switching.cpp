// The filters of linear Gaussian modes on small random series, held against plain loops in float64: the
// equations of csrc/switching/switching.hpp and csrc/switching/gaussian.hpp, one number at a time.
#include "../../csrc/switching/series.hpp"
#include "check.hpp"

extern "C" int64_t exptilt_filter_series(Series*);

namespace {

using Numbers = std::vector<double>;

Numbers draw(int64_t count, double size) {
  Numbers x(count);
  for (double& one : x) one = size * normal();
  return x;
}
// count covariances A A' + least I.
Numbers covariances(int64_t count, int n, double size, double least) {
  Numbers all;
  for (int64_t c = 0; c < count; ++c) {
    const Numbers A = draw(n * n, size);
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j) {
        double sum = i == j ? least : 0;
        for (int k = 0; k < n; ++k) sum += A[i * n + k] * A[j * n + k];
        all.push_back(sum);
      }
  }
  return all;
}

struct Law {
  Numbers x, P;
};
// A x + c, A P A' + Q.
Law moved(const Law& law, const double* A, const double* c, const double* Q) {
  const int n = int(law.x.size());
  Law made{Numbers(n), Numbers(n * n)};
  for (int i = 0; i < n; ++i) {
    made.x[i] = c ? c[i] : 0;
    for (int k = 0; k < n; ++k) made.x[i] += A[i * n + k] * law.x[k];
    for (int j = 0; j < n; ++j) {
      double sum = Q[i * n + j];
      for (int k = 0; k < n; ++k)
        for (int l = 0; l < n; ++l) sum += A[i * n + k] * law.P[k * n + l] * A[j * n + l];
      made.P[i * n + j] = sum;
    }
  }
  return made;
}
Law collapsed(const std::vector<Law>& laws, const Numbers& weight) {
  const int n = int(laws[0].x.size());
  Law made{Numbers(n), Numbers(n * n)};
  for (size_t k = 0; k < laws.size(); ++k)
    for (int i = 0; i < n; ++i) made.x[i] += weight[k] * laws[k].x[i];
  for (size_t k = 0; k < laws.size(); ++k)
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j)
        made.P[i * n + j] += weight[k] * (laws[k].P[i * n + j] +
                                          (laws[k].x[i] - made.x[i]) * (laws[k].x[j] - made.x[j]));
  return made;
}
// Conditions on the components of y that are seen, one after another: elimination has made their noise
// independent. Returns the log-density.
double condition(Law& law, const double* y, const double* H, const double* d, const double* R, int m) {
  const int n = int(law.x.size());
  std::vector<int> seen;
  for (int a = 0; a < m; ++a)
    if (y[a] == y[a]) seen.push_back(a);
  const int s = int(seen.size());
  Numbers h(s * n), e(s), noise(s * s);
  for (int a = 0; a < s; ++a) {
    e[a] = y[seen[a]] - d[seen[a]];
    for (int k = 0; k < n; ++k) h[a * n + k] = H[seen[a] * n + k];
    for (int b = 0; b < s; ++b) noise[a * s + b] = R[seen[a] * m + seen[b]];
  }
  for (int a = 0; a < s; ++a)  // elimination, of the rows that follow and of their columns
    for (int b = a + 1; b < s; ++b) {
      const double ratio = noise[b * s + a] / noise[a * s + a];
      e[b] -= ratio * e[a];
      for (int k = 0; k < n; ++k) h[b * n + k] -= ratio * h[a * n + k];
      for (int k = 0; k < s; ++k) noise[b * s + k] -= ratio * noise[a * s + k];
      for (int k = 0; k < s; ++k) noise[k * s + b] -= ratio * noise[k * s + a];
    }
  double density = 0;
  for (int a = 0; a < s; ++a) {
    Numbers Ph(n);
    double S = noise[a * s + a], gap = e[a];
    for (int i = 0; i < n; ++i) {
      for (int k = 0; k < n; ++k) Ph[i] += law.P[i * n + k] * h[a * n + k];
      gap -= h[a * n + i] * law.x[i];
    }
    for (int i = 0; i < n; ++i) S += h[a * n + i] * Ph[i];
    density -= 0.5 * (std::log(6.283185307179586 * S) + gap * gap / S);
    for (int i = 0; i < n; ++i) {
      law.x[i] += Ph[i] * gap / S;
      for (int j = 0; j < n; ++j) law.P[i * n + j] -= Ph[i] * Ph[j] / S;
    }
  }
  return density;
}

struct Setting {
  const char* name;
  int method, first, M, n, m, varies, mapped;
};

bool check(const Setting& set) {
  const int M = set.M, n = set.n, m = set.m, lengths[] = {7, 1, 12};
  const std::vector<int64_t> starts{0, 7, 8, 20};
  const int64_t rows = 20, times = set.varies ? 12 : 1, models = set.varies ? 3 : 1;
  Numbers transition(M * M), initial(M), y = draw(rows * m, 1.5);
  for (int i = 0; i < M; ++i) {
    double sum = 0;
    for (int j = 0; j < M; ++j) sum += transition[i * M + j] = j == M - 1 && M > 2 && i == 0 ? 0 : uniform();
    for (int j = 0; j < M; ++j) transition[i * M + j] /= sum;
    initial[i] = std::log(i == 0 && M > 1 ? 0.4 : 0.6 / std::max(1, M - 1));
  }
  if (M == 1) initial[0] = 0;
  for (int64_t i = 0; i < rows * m; ++i)
    if (uniform() < 0.2) y[i] = NAN;
  const Numbers W = draw(models * times * M * n * n, 0.5), c = draw(M * n, 1);
  const Numbers Q = covariances(M, n, 0.5, 0.1);
  const Numbers H = draw(M * m * n, 1), d = draw(M * m, 0.3), R = covariances(M, m, 0.5, 0.2);
  const Numbers mean = draw(M * n, 1), P = covariances(M, n, 0.7, 0.1);
  const Numbers maps = draw(M * M * n * n, 0.8), spread = covariances(M * M, n, 0.2, 0.01);

  Numbers likelihood(3), terms(rows), log_mode(rows * M), mixing(rows * M * M);
  Numbers means(rows * M * n), covs(rows * M * n * n);
  std::vector<int64_t> failure(6, -1);
  Series f{};
  f.modes = M, f.method = set.method, f.first = set.first, f.everything = 1;
  f.series = 3, f.starts = starts.data();
  f.log_likelihood = likelihood.data(), f.terms = terms.data(), f.log_mode = log_mode.data();
  f.mixing = mixing.data(), f.failure = failure.data(), f.states = n, f.outputs = m;
  f.transition = transition.data(), f.dynamics = W.data(), f.dynamics_offset = c.data();
  f.process_noise = Q.data();
  if (set.varies) f.dynamics_step = M * n * n, f.dynamics_series = times * M * n * n;
  f.observation = H.data(), f.observation_offset = d.data(), f.observation_noise = R.data();
  f.initial_mean = mean.data(), f.initial_covariance = P.data(), f.initial_log_probability = initial.data();
  if (set.mapped) f.maps = maps.data(), f.map_covariance = spread.data();
  f.y = y.data(), f.mode_mean = means.data(), f.mode_covariance = covs.data();
  const int64_t stops = exptilt_filter_series(&f);

  Numbers true_likelihood(3), true_terms, true_modes, true_means, true_covs;
  for (int series = 0; series < 3; ++series) {
    std::vector<Law> laws;
    Numbers probability(M);
    for (int j = 0; j < M; ++j) {
      const double *x = &mean[j * n], *cov = &P[j * n * n];
      laws.push_back({Numbers(x, x + n), Numbers(cov, cov + n * n)});
      probability[j] = std::exp(initial[j]);
    }
    const auto read = [&](int i, int j) {  // the law of mode i as mode j reads it
      const int64_t at = (i * M + j) * n * n;
      return set.mapped ? moved(laws[i], &maps[at], nullptr, &spread[at]) : laws[i];
    };
    for (int t = 0; t < lengths[series]; ++t) {
      const double* now = &W[set.varies ? (series * times + t) * M * n * n : 0];
      const double* seen = &y[(starts[series] + t) * m];
      const auto see = [&](int j, Law& law) {
        return condition(law, seen, &H[j * m * n], &d[j * m], &R[j * m * m], m);
      };
      const auto step = [&](int j, const Law& law) {
        return moved(law, now + j * n * n, &c[j * n], &Q[j * n * n]);
      };
      std::vector<Law> after(M);
      Numbers weight(M);  // of modes, with the density of what is seen
      for (int j = 0; j < M; ++j) {
        if (t == 0 && set.first) {
          after[j] = laws[j];
          weight[j] = probability[j] * std::exp(see(j, after[j]));
          continue;
        }
        std::vector<Law> parts;
        Numbers share(M);
        double sum = 0;
        for (int i = 0; i < M; ++i) {
          share[i] = probability[i] * transition[i * M + j];
          parts.push_back(read(i, j));
          if (set.method >= GPB2) {
            parts[i] = step(j, parts[i]);
            share[i] *= std::exp(see(j, parts[i]));
          }
          sum += share[i];
        }
        if (set.method == VITERBI) {
          const int best = int(std::max_element(share.begin(), share.end()) - share.begin());
          sum = share[best];
          for (int i = 0; i < M; ++i) share[i] = i == best ? sum : 0;
        }
        weight[j] = sum;
        const bool own = sum > 0 && set.method != GPB1;
        for (int i = 0; i < M; ++i) share[i] = own ? share[i] / sum : probability[i];
        after[j] = collapsed(parts, share);
        if (set.method >= GPB2) continue;
        after[j] = step(j, after[j]);
        weight[j] *= std::exp(see(j, after[j]));
      }
      double sum = 0;
      for (double w : weight) sum += w;
      for (int j = 0; j < M; ++j) {
        probability[j] = weight[j] / sum;
        true_modes.push_back(std::log(probability[j]));
        for (double x : after[j].x) true_means.push_back(x);
        for (double x : after[j].P) true_covs.push_back(x);
      }
      laws = after;
      true_terms.push_back(std::log(sum));
      true_likelihood[series] += std::log(sum);
    }
  }
  const std::string name = set.name;
  bool right = judge(name, "series that stopped", {0}, {double(stops)}, 0);
  right &= judge(name, "log-likelihood", true_likelihood, likelihood, 1e-12);
  right &= judge(name, "its terms", true_terms, terms, 1e-12);
  right &= judge(name, "log-probability of modes", true_modes, log_mode, 1e-12);
  right &= judge(name, "means of modes", true_means, means, 1e-12);
  return judge(name, "covariances of modes", true_covs, covs, 1e-12) && right;
}

}  // namespace

bool switching_is_right() {
  bool right = true;
  for (const Setting& set : {
           Setting{"IMM, 3 modes", IMM, 0, 3, 2, 1, 0, 0},
           Setting{"IMM, 5 modes, in time", IMM, 1, 5, 4, 2, 1, 0},
           Setting{"IMM, maps", IMM, 0, 2, 3, 2, 0, 1},
           Setting{"GPB1, 4 modes", GPB1, 0, 4, 1, 1, 0, 0},
           Setting{"GPB2, 3 modes", GPB2, 0, 3, 4, 2, 0, 0},
           Setting{"GPB2, 6 modes, in time", GPB2, 1, 6, 5, 3, 1, 0},
           Setting{"GPB2, maps", GPB2, 0, 3, 2, 2, 1, 1},
           Setting{"Viterbi, 3 modes", VITERBI, 0, 3, 2, 1, 0, 0},
           Setting{"Kalman, 9 states", IMM, 0, 1, 9, 3, 1, 0},
       })
    right &= check(set);
  return right;
}
