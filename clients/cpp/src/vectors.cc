#include "vectors.h"

#include <algorithm>
#include <fstream>

#include "payload.h"

namespace {

using nlohmann::json;

std::string Bytes(const std::string& hexadecimal) {
  std::string bytes;
  for (size_t i = 0; i < hexadecimal.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hexadecimal.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

Expected ExpectedOf(const json& file, const json& one, int size) {
  const bool up = one.at("way") == "up";
  const json& settings = one.at("settings");
  return {
      .codec = one.at("codec"),
      .version = file.at("version"),
      .size = size,
      .bits = settings.value("bits", settings.value(up ? "bits_up" : "bits_down", 0)),
  };
}

bool IsRead(const json& file, const json& one) {
  const int segment = one.at("segment");
  const int size = one.at("cuts").at(segment + 1).get<int>() - one.at("cuts").at(segment).get<int>();
  std::vector<double> elements(size);
  for (const auto& [place, value] : one.at("decoded").get<std::vector<std::pair<int, double>>>()) {
    elements.at(place) = value;
  }
  const auto found = Decode(Bytes(one.at("payload")), ExpectedOf(file, one, size));
  return std::ranges::equal(found, elements);
}

bool IsRefused(const json& file, const json& refused, const std::string& payload) {
  try {
    Decode(Bytes(payload), ExpectedOf(file, refused, refused.at("size")));
    return false;
  } catch (const Refused&) {
    return true;
  }
}

}  // namespace

json CheckVectors(const std::string& path) {
  std::ifstream stream(path);
  const auto file = json::parse(stream);
  const std::string codec = file.at("codec");
  for (const auto& [name, one] : file.at("cases").items()) {
    if (!IsRead(file, one)) throw std::runtime_error(codec + ": " + name + ": the elements differ from the file");
  }
  const auto& refused = file.at("refused");
  for (const auto& [why, payload] : refused.at("payloads").items()) {
    if (!IsRefused(file, refused, payload)) throw std::runtime_error(codec + ": not refused: " + why);
  }
  return {{"codec", codec}, {"decoded", file.at("cases").size()}, {"refused", refused.at("payloads").size()}};
}
