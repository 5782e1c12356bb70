#include "ids.h"

#include <cstdio>
#include <random>

std::string Random(int size) {
  static thread_local std::random_device device;
  std::string bytes;
  for (int i = 0; i < size; ++i) bytes.push_back(static_cast<char>(device()));
  return bytes;
}

std::string Uuid() {
  auto bytes = Random(16);
  bytes[6] = (bytes[6] & 0x0f) | 0x40;  // version 4
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  std::string text;
  for (size_t i = 0; i < bytes.size(); ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(bytes[i]));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits;
  }
  return text;
}
