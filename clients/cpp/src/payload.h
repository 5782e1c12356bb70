// Decodes exchanged gradients as docs/exchange-wire.md says.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

// A payload of which nothing may be used.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What the reader knows beforehand; a payload that is not so is refused.
struct Expected {
  std::string codec;
  int version;
  int size;
  int bits;
};

// Returns the elements of a segment. Throws Refused.
std::vector<float> Decode(std::string_view data, const Expected& expected);
