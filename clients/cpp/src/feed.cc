#include "feed.h"

#include <vector>

#include "ids.h"

namespace {

nlohmann::json Described(const store::Attempt& attempt) {
  auto rewards = nlohmann::json::array();
  for (const auto& reward : attempt.rewards()) rewards.push_back(reward.value());
  return {
      {"attempt", attempt.name()},
      {"state", store::AttemptState_Name(attempt.state())},
      {"failure_kind", store::FailureKind_Name(attempt.failure_kind())},
      {"rewards", rewards},
      {"output", attempt.output()},
  };
}

// The group that a part ends, with the members of all its parts.
nlohmann::json Described(const store::FinishedGroup& group, const std::vector<store::Rollout>& members) {
  auto rollouts = nlohmann::json::array();
  for (const auto& rollout : members) {
    auto attempts = nlohmann::json::array();
    for (const auto& attempt : rollout.attempts()) attempts.push_back(Described(attempt));
    rollouts.push_back(
        {{"rollout", rollout.name()}, {"state", store::RolloutState_Name(rollout.state())}, {"attempts", attempts}});
  }
  return {{"group_id", group.group_id()}, {"cursor", group.cursor()}, {"rollouts", rollouts}};
}

}  // namespace

void Create(const Connection& connection, const Options& options) {
  store::BatchCreateRolloutsRequest request;
  request.set_request_id(options.request_id.empty() ? Uuid() : options.request_id);
  for (int i = 0; i < options.count; ++i) {
    auto* rollout = request.add_rollouts();
    rollout->set_project(options.project);
    rollout->set_training_run(options.training_run);
    rollout->set_group_id(options.group_id);
    rollout->set_group_size(options.group_id.empty() ? 1 : options.count);
    rollout->mutable_required_labels()->insert(options.labels.begin(), options.labels.end());
    rollout->set_input(options.input);
  }
  store::BatchCreateRolloutsResponse created;
  WhileUnavailable(connection, [&] {
    const auto call = CallBy(connection.token, connection.deadline);
    Check(connection.rollouts->BatchCreateRollouts(call.get(), request, &created));
  });
  for (const auto& rollout : created.rollouts()) {
    Emit({{"rollout", rollout.name()}, {"state", store::RolloutState_Name(rollout.state())}});
  }
}

void Watch(const Connection& connection, const Options& options) {
  store::WatchRolloutsRequest request;
  request.set_project(options.project);
  request.set_training_run(options.training_run);
  request.set_cursor(options.cursor);
  int handled = 0;
  WhileUnavailable(connection, [&] {
    const auto call = CallBy(connection.token, connection.deadline);
    const auto stream = connection.rollouts->WatchRollouts(call.get(), request);
    std::vector<store::Rollout> members;
    for (store::WatchRolloutsResponse message; stream->Read(&message);) {
      for (const auto& part : message.groups()) {
        members.insert(members.end(), part.rollouts().begin(), part.rollouts().end());
        if (part.cursor().empty()) continue;  // more of a large group follows
        Emit(Described(part, members));
        members.clear();
        request.set_cursor(part.cursor());
        if (++handled == options.count) return call->TryCancel();
      }
    }
    Check(stream->Finish());
  });
}
