// Loads each library that is named, and prints whether it says that this processor runs it: "1 0 0".
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>

int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    void* library = dlopen(names[i], RTLD_NOW);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    const auto runs = reinterpret_cast<int64_t (*)()>(dlsym(library, "exptilt_runs_here"));
    std::printf("%d ", int(runs()));
  }
  return 0;
}
