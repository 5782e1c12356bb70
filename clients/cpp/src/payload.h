// Decodes exchanged gradients as described in docs/exchange-wire.md.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

// An invalid payload; no part of it may be used.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What the reader knows beforehand; a payload that differs is refused.
struct Expected {
  std::string codec;
  int version;
  int size;
  int bits;
};

// Returns the elements of a segment. Throws Refused.
std::vector<float> Decode(std::string_view data, const Expected& expected);
