// Compiled into the bridges that a wheel carries, so that they run where torch's own wheels do: with the glibc and the
// libstdc++ of manylinux_2_28. A newer compiler refers to some newer symbols; here they are defined in the bridge itself.

#include <new>
#include <sstream>

// Their default constructors came with GCC 9, and other members later.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;

// Came with GCC 11.
namespace std {
void __throw_bad_array_new_length() {
  throw std::bad_array_new_length();
}
}  // namespace std

// Came with glibc 2.32. Always false: whoever counts references then does so with atomic operations.
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
