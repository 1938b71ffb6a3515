#include "frame.hpp"
