// Float buffers that a thread keeps between calls: they only grow.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace girih {

class Scratch {
 public:
  // Room for `count` floats, aligned to a cache line; earlier content is lost.
  float* floats(size_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = (count + count / 4 + 1023) / 1024 * 1024;
      data_ = static_cast<float*>(std::aligned_alloc(64, capacity_ * sizeof(float)));
      if (data_ == nullptr) {
        capacity_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }
  ~Scratch() { std::free(data_); }

 private:
  float* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace girih
