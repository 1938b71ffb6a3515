// Frames: the arguments of a kernel, as named fields of one plain struct that Python fills.
//
// A list of fields is written once, as a macro. It becomes the struct here, and a text from which
// exptilt/_support/native.py makes the same struct with ctypes, so the two cannot differ:
//
//     #define WALK_FIELDS(whole, real, place) whole(steps) real(scale) place(const double, start) place(double, out)
//     EXPTILT_FRAME(Walk, WALK_FIELDS)
//     EXPTILT_KERNEL(walk, Walk) { for (int64_t t = 0; t < f.steps; ++t) f.out[t] = f.scale * f.start[t]; return 0; }
//
// Every field takes eight bytes: a whole number, a float64, or the address of numbers in memory (0: absent).
#pragma once
#include <cstdint>
#include <new>

#if defined(_WIN32)
#define EXPTILT_EXPORT extern "C" __declspec(dllexport)
#else
#define EXPTILT_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#define EXPTILT_WHOLE(name) int64_t name;
#define EXPTILT_REAL(name) double name;
#define EXPTILT_PLACE(type, name) type* name;
#define EXPTILT_WHOLE_TEXT(name) "whole " #name "\n"
#define EXPTILT_REAL_TEXT(name) "real " #name "\n"
#define EXPTILT_PLACE_TEXT(type, name) "place " #name "\n"

#define EXPTILT_FRAME(Name, FIELDS)                                                   \
  struct Name {                                                                       \
    FIELDS(EXPTILT_WHOLE, EXPTILT_REAL, EXPTILT_PLACE)                                \
  };                                                                                  \
  EXPTILT_EXPORT const char* exptilt_fields_##Name() {                                \
    return FIELDS(EXPTILT_WHOLE_TEXT, EXPTILT_REAL_TEXT, EXPTILT_PLACE_TEXT);         \
  }

// A kernel returns a whole number, 0 or more, with a meaning of its own; −1 means that memory ran out.
constexpr int64_t OUT_OF_MEMORY = -1;
#define EXPTILT_KERNEL(name, Name)                                                    \
  static int64_t name##_body(Name& f);                                                \
  EXPTILT_EXPORT int64_t exptilt_##name(Name* frame) {                                \
    try {                                                                             \
      return name##_body(*frame);                                                     \
    } catch (const std::bad_alloc&) {                                                 \
      return OUT_OF_MEMORY;                                                           \
    }                                                                                 \
  }                                                                                   \
  static int64_t name##_body(Name& f)
