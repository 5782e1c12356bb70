// A client of Fulmen in one program: `client COMMAND [--flag value]...`. docs/clients.md explains commands and flags.
//
// Prints one JSON object per line. Errors are printed to stderr, with the exit status 1 (2: invalid command line).

#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>

#include "connection.h"
#include "feed.h"
#include "options.h"
#include "runner.h"
#include "vectors.h"

namespace {

std::map<std::string, std::string> LabelsOf(const std::string& text) {
  const auto end = text.find('=');
  if (end == std::string::npos) return {};
  return {{text.substr(0, end), text.substr(end + 1)}};
}

Options Read(const std::vector<std::string>& words) {
  Options options;
  const std::map<std::string, std::function<void(const std::string&)>> flags = {
      {"--project", [&](const auto& value) { options.project = value; }},
      {"--training-run", [&](const auto& value) { options.training_run = value; }},
      {"--group-id", [&](const auto& value) { options.group_id = value; }},
      {"--request-id", [&](const auto& value) { options.request_id = value; }},
      {"--label", [&](const auto& value) { options.labels = LabelsOf(value); }},
      {"--input", [&](const auto& value) { options.input = value; }},
      {"--cursor", [&](const auto& value) { options.cursor = value; }},
      {"--model", [&](const auto& value) { options.model = value; }},
      {"--count", [&](const auto& value) { options.count = std::stoi(value); }},
      {"--slots", [&](const auto& value) { options.slots = std::stoi(value); }},
      {"--work-s", [&](const auto& value) { options.work_s = std::stod(value); }},
      {"--deadline-s", [&](const auto& value) { options.deadline_s = std::stod(value); }},
  };
  options.command = words.empty() ? "" : words.front();
  if (options.command != "create" && options.command != "run" && options.command != "watch" &&
      options.command != "vectors") {
    throw std::invalid_argument("unknown command: " + options.command);
  }
  for (size_t i = 1; i < words.size(); ++i) {
    if (!words[i].starts_with("--")) {
      options.files.push_back(words[i]);
    } else if (!flags.contains(words[i]) || i + 1 == words.size()) {
      throw std::invalid_argument("unknown flag: " + words[i]);
    } else {
      flags.at(words[i])(words[i + 1]);
      ++i;
    }
  }
  return options;
}

void Perform(const Options& options) {
  if (options.command == "vectors") {
    for (const auto& file : options.files) Emit(CheckVectors(file));
    return;
  }
  const auto limit = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.deadline_s));
  const auto connection = Connect(Clock::now() + limit);
  if (options.command == "create") Create(connection, options);
  if (options.command == "watch") Watch(connection, options);
  if (options.command == "run") Runner(connection, options).Run();
}

int Fail(int status, const Error& error) {
  const nlohmann::json shown = {
      {"code", error.code}, {"reason", error.reason}, {"message", error.what()}, {"metadata", error.metadata}};
  std::cerr << nlohmann::json{{"error", shown}}.dump() << std::endl;
  return status;
}

}  // namespace

int main(int count, char** words) {
  setenv("GRPC_VERBOSITY", "NONE", 0);  // stderr has only the error, unless gRPC's log is enabled
  Options options;
  try {
    options = Read({words + 1, words + count});
  } catch (const std::logic_error& wrong) {  // stoi and stod throw these, too
    return Fail(2, Error("USAGE", wrong.what()));
  }
  try {
    Perform(options);
    return 0;
  } catch (const Error& error) {
    return Fail(1, error);
  } catch (const std::exception& error) {
    return Fail(1, Error("FAILED", error.what()));
  }
}
