// Random, unique names.
#pragma once

#include <string>

// Returns random bytes.
std::string Random(int size);

// Returns a random UUID as text.
std::string Uuid();
