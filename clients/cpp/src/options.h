// The command line, and the program's output.
#pragma once

#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

struct Options {
  std::string command;
  std::vector<std::string> files;
  std::string project = "projects/default";
  std::string training_run;
  std::string group_id;
  std::string request_id;
  std::map<std::string, std::string> labels;  // labels that rollouts require of a runner, or that a runner has
  std::string input = R"({"question": "6*7="})";
  std::string cursor;
  std::string model;
  int count = 1;
  int slots = 1;
  double work_s = 0;
  double deadline_s = 60;
};

inline void Emit(const nlohmann::json& event) { std::cout << event.dump() << std::endl; }
