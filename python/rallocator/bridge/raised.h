// An exception that waits for a call to return: std::exception_ptr, declared by hand.
//
// From GCC 11 on, inline parts of the standard one call functions that the libstdc++ of older systems lacks, and torch runs
// on those. The functions below are what those parts call in older compilers; every libstdc++ since GCC 4.4 has them.
#pragma once

#include <utility>

namespace rallocator {

class Raised;

// The names are those of std::current_exception, std::rethrow_exception and the destructor of std::exception_ptr, by the
// Itanium C++ ABI. A class that is one pointer and has a destructor of its own is passed and returned as the standard one.
Raised current_exception() noexcept __asm__("_ZSt17current_exceptionv");
[[noreturn]] void rethrow_exception(Raised) __asm__("_ZSt17rethrow_exceptionNSt15__exception_ptr13exception_ptrE");
void forget_exception(Raised*) noexcept __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

class Raised {
 public:
  Raised() = default;
  Raised(Raised&& other) noexcept : exception_(std::exchange(other.exception_, nullptr)) {}
  Raised& operator=(Raised&& other) noexcept {
    std::swap(exception_, other.exception_);
    return *this;
  }
  ~Raised() {
    forget_exception(this);
  }

  explicit operator bool() const {
    return exception_ != nullptr;
  }

 private:
  void* exception_ = nullptr;
};

static_assert(sizeof(Raised) == sizeof(void*));

}  // namespace rallocator
