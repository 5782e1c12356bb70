// Checks the decoder of payloads against a file of protos/testdata/exchange.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

// Decodes everything in the file; throws at the first payload whose result differs from the file.
nlohmann::json CheckVectors(const std::string& path);
