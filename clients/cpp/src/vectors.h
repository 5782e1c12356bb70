// Holds the decoder of payloads to a file of protos/testdata/exchange.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

// Decodes everything in the file; throws at the first payload that is not read as the file says.
nlohmann::json CheckVectors(const std::string& path);
