// The frame of attention: the arguments of every sweep, in one struct that its threads share.
//
// An *operand* is a tensor of vectors (..., heads, length, dim): the address of its first number, a table that
// says where each head's block begins (in numbers, from the first), the distance in numbers between vectors, and
// their kind. So a slice of a longer cache, a broadcast batch axis and half precision are read where they are.
//
// A *plane* is a tensor that belongs to pairs of a query and a key (..., heads, queries or 1, keys or 1): address,
// table, and the distance in numbers between queries and between keys, 0 along an axis that is shared. A
// log-weight is a plane with one row. An absent operand or plane has address 0.
#pragma once
#include "frame.hpp"
#include "attention/pack.hpp"

struct Operand {
  const char* at;
  const int64_t* table;
  int64_t step, kind;
  explicit operator bool() const { return at != nullptr; }
};
struct Plane {
  const char* at;
  const int64_t* table;
  int64_t row, column;
  explicit operator bool() const { return at != nullptr; }
};

#define ATTENTION_FIELDS(whole, real, place, operand, plane)                                                      \
  whole(next)          /* the first unit of work that nobody has taken yet */                                     \
  whole(units)                                                                                                    \
  whole(chunk)         /* units taken at a time */                                                                \
  whole(bad)           /* set to 1 where a query's sum of weights is NaN */                                       \
  whole(blind)         /* set to 1 where a query has keys to see, and all of their scores are −inf */             \
  whole(failed)        /* set to 1 where memory ran out */                                                        \
  whole(blocks)        /* batch items times key heads */                                                          \
  whole(group)         /* query heads that share a key head */                                                    \
  whole(Q) whole(K) whole(D) whole(Dv) whole(causal)                                                              \
  whole(window)        /* −1 for none */                                                                          \
  whole(thin)          /* few queries or few keys: nothing is packed */                                           \
  whole(tile_rows) whole(tile_keys)                                                                               \
  whole(strip)         /* rows that are carried from scores to sums together */                                   \
  whole(shelf_slots)   /* packed tiles that a thread keeps */                                                     \
  whole(row_parts) whole(key_parts)                                                                               \
  whole(row_tile_from) whole(row_tile_to) /* the rows of every block that a backward sweep goes over */           \
  whole(keys_outside)  /* backward: 1 if tiles of keys are the outer loop, and rows the inner one */              \
  place(const int64_t, order) place(const int64_t, bounds) /* an owner's blocks are order[bounds[owner]] … */     \
  place(char, output) place(char, statistics) place(int64_t, best) /* results */                                  \
  whole(top)           /* how many of a row's heaviest keys are wanted */                                         \
  place(const int64_t, skip) /* a key that each query leaves out, −1 for none */                                  \
  place(const char, rows) /* (lines, queries): numbers given for each query; each sweep lists its lines */        \
  place(char, query_grad) place(char, key_grad) place(char, value_grad)                                           \
  place(double, column_sum) place(double, row_sum)                                                                \
  place(char, bias_grad) place(const int64_t, bias_grad_at) whole(bias_grad_row)                                  \
  whole(need_query) whole(need_key) whole(need_value)                                                             \
  whole(second)        /* whether a backward sweep is that of second derivatives */                               \
  real(scale) real(cap)                                                                                           \
  operand(query) operand(key) operand(value) operand(cotangent) operand(attended) operand(attended_dot)           \
  operand(query_dot) operand(key_dot) operand(value_dot)                                                          \
  plane(bias) plane(weight) plane(mask) plane(bias_dot) plane(weight_dot)

#define EXPTILT_OPERAND(name) Operand name;
#define EXPTILT_PLANE(name) Plane name;
#define EXPTILT_OPERAND_TEXT(name) \
  "place " #name "\nplace " #name "_table\nwhole " #name "_step\nwhole " #name "_kind\n"
#define EXPTILT_PLANE_TEXT(name) \
  "place " #name "\nplace " #name "_table\nwhole " #name "_row\nwhole " #name "_column\n"

struct Attention {
  ATTENTION_FIELDS(EXPTILT_WHOLE, EXPTILT_REAL, EXPTILT_PLACE, EXPTILT_OPERAND, EXPTILT_PLANE)

  // Takes the next `chunk` units for the calling thread; returns the first.
  int64_t take() { return __atomic_fetch_add(&next, chunk, __ATOMIC_RELAXED); }
  int64_t rows_of_block() const { return group * Q; }
  int64_t all_rows() const { return blocks * group * Q; }
  // Number `line` of those given for a row.
  template <class T> INLINE T known(int64_t line, int64_t row) const {
    return reinterpret_cast<const T*>(rows)[line * all_rows() + row];
  }
};
INLINE void raise_flag(int64_t& flag) { __atomic_store_n(&flag, 1, __ATOMIC_RELAXED); }

// Calls body(unit) for each unit that this thread takes.
template <class Body> inline void for_units(Attention& f, Body body) {
  for (int64_t start; (start = f.take()) < f.units;)
    for (int64_t unit = start; unit < std::min(start + f.chunk, f.units); ++unit) body(unit);
}

// Lower bound of a score less the mean. A hidden key's score is −inf; with this bound, weight 0 times the square of
// the difference is 0 and not NaN.
constexpr double FAR = -1e15;
// Tiles after which running sums are added to float64 totals: a sum over a million keys is then as exact as one
// over a few thousand.
constexpr int64_t FLUSH = 16;
