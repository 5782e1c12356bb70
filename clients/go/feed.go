package main

import (
	"context"

	storev1 "fulmen.dev/client/stubs/fulmen/store/v1"
)

// create creates a group of rollouts with the same input. The request id makes the request idempotent.
func create(ctx context.Context, store *connection, o options) error {
	request := &storev1.BatchCreateRolloutsRequest{RequestId: o.requestID}
	if o.requestID == "" {
		request.RequestId = uuid()
	}
	for i := 0; i < o.count; i++ {
		rollout := &storev1.Rollout{
			Project: o.project, TrainingRun: o.trainingRun, GroupId: o.groupID,
			RequiredLabels: o.labels(), Input: []byte(o.input),
		}
		if o.groupID != "" {
			rollout.GroupSize = int32(o.count)
		}
		request.Rollouts = append(request.Rollouts, rollout)
	}
	return whileUnavailable(ctx, func(ctx context.Context) error {
		created, err := store.rollouts.BatchCreateRollouts(ctx, request)
		for _, rollout := range created.GetRollouts() {
			emit(object{"rollout": rollout.Name, "state": rollout.State.String()})
		}
		return err
	})
}

// watch reads finished groups. A broken stream is opened again after the last group that was handled.
func watch(ctx context.Context, store *connection, o options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream
	cursor, handled := o.cursor, 0
	return whileUnavailable(ctx, func(ctx context.Context) error {
		request := &storev1.WatchRolloutsRequest{Project: o.project, TrainingRun: o.trainingRun, Cursor: cursor}
		stream, err := store.rollouts.WatchRollouts(ctx, request)
		members := []*storev1.Rollout{}
		for err == nil {
			var message *storev1.WatchRolloutsResponse
			message, err = stream.Recv()
			for _, part := range message.GetGroups() {
				members = append(members, part.Rollouts...)
				if part.Cursor == "" {
					continue // more of a large group follows
				}
				emit(described(part, members))
				members = nil
				cursor = part.Cursor
				if handled++; handled == o.count {
					return nil
				}
			}
		}
		return err
	})
}

func described(group *storev1.FinishedGroup, members []*storev1.Rollout) object {
	rollouts := []object{}
	for _, rollout := range members {
		attempts := []object{}
		for _, attempt := range rollout.Attempts {
			rewards := []float64{}
			for _, reward := range attempt.Rewards {
				rewards = append(rewards, reward.Value)
			}
			attempts = append(attempts, object{
				"attempt": attempt.Name, "state": attempt.State.String(), "failure_kind": attempt.FailureKind.String(),
				"rewards": rewards, "output": string(attempt.Output),
			})
		}
		rollouts = append(rollouts, object{"rollout": rollout.Name, "state": rollout.State.String(), "attempts": attempts})
	}
	return object{"group_id": group.GroupId, "cursor": group.Cursor, "rollouts": rollouts}
}
