// Operands with a vector for each key (keys, values, their tangents), read by one thread tile by tile.
//
// `against` takes dot products of rows with an operand's vectors, `gather` weighted sums of the vectors. Each of the
// two has its own packed form, and a shelf that keeps packed tiles for the next queries of the same head. A shelf
// belongs to one thread. With few queries, or few keys, nothing is packed, and the operand is read where it is.
//
// A hidden key has a weight of exactly 0. Its vector may hold NaN or an infinity, which must not reach a sum: sums
// over a tile with such numbers do not use the packed form and skip each vector of weight 0 (`thin_sum`).
#pragma once
#include <memory>
#include <vector>

#include "attention/product.hpp"
#include "attention/scores.hpp"

// Numbers between the pieces of an arena; a build with the address sanitizer forbids access to them.
#ifdef __SANITIZE_ADDRESS__
extern "C" void __asan_poison_memory_region(const volatile void*, size_t);
constexpr int64_t GUARD = 16;
#else
constexpr int64_t GUARD = 0;
#endif

// Memory of one thread: `plan` every piece, `open`, then take each `piece`, which begins at a cache line.
template <class T> class Arena {
 public:
  void plan(int64_t count) { size_ += rounded(count) + GUARD; }
  void open() {
    memory_.reset(new char[size_ * sizeof(T) + 64]);
    at_ = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64);
  }
  T* piece(int64_t count) {
    T* made = at_;
    at_ += rounded(count) + GUARD;
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(made + count, (at_ - made - count) * sizeof(T));
#endif
    return made;
  }

 private:
  static int64_t rounded(int64_t count) { return (count + 15) / 16 * 16; }
  int64_t size_ = 0;
  std::unique_ptr<char[]> memory_;
  T* at_ = nullptr;
};

// Columns rounded up to whole panels.
template <class T> INLINE int64_t panels(int64_t columns) {
  constexpr int64_t width = 2 * Wide<T>::lanes;
  return (columns + width - 1) / width * width;
}

template <class T> struct Keys {
  struct Shelf {
    T* at;
    int64_t slot;                // numbers in a slot
    std::vector<int64_t> tags;   // block and tile in each slot
    std::vector<char> wild;      // whether the tile holds NaN or an infinity
  };
  const Attention& f;
  const Operand& operand;
  int64_t dim;
  bool dots, sums;               // whether `against`, and `gather`, are called
  T* wide = nullptr;             // a widened tile, if the operand is of half precision
  const char* block_at = nullptr;
  int64_t widened_tile = -1;
  Shelf for_dots{}, for_sums{};

  Keys(const Attention& f, const Operand& operand, int64_t dim, bool dots, bool sums)
      : f(f), operand(operand), dim(dim), dots(dots), sums(sums) {}

  int64_t wide_room() const { return operand.kind == NATIVE ? 0 : f.tile_keys * dim; }
  int64_t slots() const { return f.thin ? 0 : f.shelf_slots; }
  void plan(Arena<T>& arena) const {
    if (!operand) return;
    arena.plan(wide_room());
    if (dots) arena.plan(slots() * f.tile_keys * dim);
    if (sums) arena.plan(slots() * f.tile_keys * panels<T>(dim));
  }
  void open(Arena<T>& arena) {
    if (!operand) return;
    wide = arena.piece(wide_room());
    auto shelf = [&](int64_t columns) {
      const int64_t slot = f.tile_keys * columns;
      return Shelf{arena.piece(slots() * slot), slot, std::vector<int64_t>(slots(), -1), std::vector<char>(slots())};
    };
    if (dots) for_dots = shelf(dim);
    if (sums) for_sums = shelf(panels<T>(dim));
  }
  // From now on, read the vectors of this block.
  void enter(int64_t block) {
    if (!operand) return;
    block_at = operand.at + operand.table[block] * bytes_of<T>(operand.kind);
    widened_tile = -1;
  }
  // A tile's vectors as numbers of type T.
  Rows<const T> tile(int64_t tile) {
    const int64_t start = tile * f.tile_keys, bytes = bytes_of<T>(operand.kind);
    const char* place = block_at + start * operand.step * bytes;
    if (operand.kind == NATIVE) return {reinterpret_cast<const T*>(place), operand.step};
    if (widened_tile != tile) {
      for (int64_t j = 0; j < std::min(f.tile_keys, f.K - start); ++j)
        copy_row(operand.kind, wide + j * dim, place + j * operand.step * bytes, dim);
      widened_tile = tile;
    }
    return {wide, dim};
  }
  // Returns the slot for a tile and marks it as holding the tile; `there` says whether it did so before.
  static int64_t slot_of(Shelf& shelf, const Strip& strip, bool& there) {
    const int64_t slot = strip.tile % int64_t(shelf.tags.size()), tag = (strip.block << 32) + strip.tile;
    there = shelf.tags[slot] == tag;
    shelf.tags[slot] = tag;
    return slot;
  }

  // C (+)= alpha A xᵀ: dot products of the rows A of a strip with its vectors x.
  void against(Rows<T> C, Rows<T> A, const Strip& strip, T alpha, bool add) {
    const int64_t count = strip.last - strip.first;
    T* target = C.at + strip.first;
    if (f.thin) {
      const auto rows = tile(strip.tile);
      thin_dots<T>(target, C.step, A.at, A.step, strip.rows, rows[strip.first], rows.step, count, dim, alpha, add);
      return;
    }
    bool there;
    T* packed = for_dots.at + slot_of(for_dots, strip, there) * for_dots.slot;
    if (!there) {
      const auto rows = tile(strip.tile);
      pack_columns<T>(packed, rows.at, rows.step, std::min(f.tile_keys, f.K - strip.tile * f.tile_keys), dim);
    }
    long_product<T>(target, C.step, A.at, A.step, packed + strip.first * dim, 2 * Wide<T>::lanes * dim, strip.rows,
                    count, dim, alpha, add);
  }
  // C += A x: sums of a strip's vectors x with weights A.
  void gather(Rows<T> C, Rows<T> A, const Strip& strip) {
    constexpr int64_t width = 2 * Wide<T>::lanes;
    const int64_t count = strip.last - strip.first, panel = f.tile_keys * width;
    const T* weights = A.at + strip.first;
    bool there = false, wild = f.thin;
    int64_t slot = 0;
    if (!f.thin) {
      slot = slot_of(for_sums, strip, there);
      if (!there) {
        const auto rows = tile(strip.tile);
        const int64_t length = std::min(f.tile_keys, f.K - strip.tile * f.tile_keys);
        for_sums.wild[slot] =
            !pack_rows<T>(for_sums.at + slot * for_sums.slot, panel, rows.at, rows.step, length, dim);
      }
      wild = for_sums.wild[slot];
    }
    if (wild) {
      const auto rows = tile(strip.tile);
      thin_sum<T>(C.at, C.step, weights, A.step, strip.rows, rows[strip.first], rows.step, count, dim);
      return;
    }
    const T* packed = for_sums.at + slot * for_sums.slot + strip.first * width;
    long_product<T>(C.at, C.step, weights, A.step, packed, panel, strip.rows, dim, count, T(1), true);
  }
};

// Copies the vectors of the queries at `where` from an operand, widened, to successive rows.
template <class T>
inline void copy_rows(Rows<T> target, const Operand& operand, int64_t dim, const Place* where, int64_t count) {
  for (int64_t r = 0; r < count; ++r) {
    const int64_t at = operand.table[where[r].head] + where[r].query * operand.step;
    copy_row(operand.kind, target[r], operand.at + at * bytes_of<T>(operand.kind), dim);
  }
}
// Moves sums of rows to the float64 total (rows, dim), adding to it if `flushed`, and clears them.
template <class T>
inline void flush(Rows<T> summed, int64_t rows, int64_t dim, double* total, bool flushed) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < dim; ++d) {
      total[r * dim + d] = flushed ? total[r * dim + d] + summed[r][d] : double(summed[r][d]);
      summed[r][d] = 0;
    }
}
