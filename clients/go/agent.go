package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	llmproxyv1 "fulmen.dev/client/stubs/fulmen/llm_proxy/v1"
	storev1 "fulmen.dev/client/stubs/fulmen/store/v1"
	commonv1 "fulmen.dev/client/stubs/opentelemetry/proto/common/v1"
	tracev1 "fulmen.dev/client/stubs/opentelemetry/proto/trace/v1"
)

// attempted runs one attempt to its end; a failure is part of the result. A real agent
// replaces solve. The rest is what any runner must do: keep the time limit, stop when requested, record a span, and
// report how the attempt ended.
func attempted(ctx context.Context, store *connection, a *storev1.Assignment, o options) *storev1.AttemptResult {
	ctx, cancel := context.WithTimeout(as(ctx, a.AttemptKey), a.Timeout.AsDuration())
	defer cancel()
	result := &storev1.AttemptResult{Attempt: a.Attempt, LeaseId: a.LeaseId, Epoch: a.Epoch}
	answer, reward, err := workedOn(ctx, store, a, o)
	if err != nil {
		result.FailureKind, result.FailureMessage = failureKind(ctx, err), err.Error()
		return result
	}
	result.Rewards = []*storev1.Reward{{Value: reward}}
	result.Output, _ = json.Marshal(object{"answer": answer})
	result.OutputContentType = "application/json"
	return result
}

func failureKind(ctx context.Context, err error) storev1.FailureKind {
	switch {
	case ctx.Err() == context.DeadlineExceeded:
		return storev1.FailureKind_FAILURE_KIND_TIMEOUT
	case ctx.Err() == context.Canceled:
		return storev1.FailureKind_FAILURE_KIND_CANCELLED
	case decoded(err).unreachable():
		return storev1.FailureKind_FAILURE_KIND_INFRA
	default:
		return storev1.FailureKind_FAILURE_KIND_AGENT_ERROR
	}
}

func workedOn(ctx context.Context, store *connection, a *storev1.Assignment, o options) (string, float64, error) {
	began := time.Now()
	var task struct{ Question string }
	var left, right int
	if err := json.Unmarshal(a.Rollout.Input, &task); err != nil {
		return "", 0, err
	}
	if _, err := fmt.Sscanf(task.Question, "%d*%d=", &left, &right); err != nil {
		return "", 0, err
	}
	product := strconv.Itoa(left * right)
	answer, err := solve(ctx, store, task.Question, product, o)
	if err != nil {
		return "", 0, err
	}
	reward := 0.0
	if strings.Contains(answer, product) {
		reward = 1
	}
	about := map[string]string{"question": task.Question, "answer": answer}
	return answer, reward, reportSpan(ctx, store, a.Attempt, began, about)
}

// solve asks the model, if there is one; otherwise it computes the answer.
func solve(ctx context.Context, store *connection, question, product string, o options) (string, error) {
	select {
	case <-time.After(seconds(o.workS)):
	case <-ctx.Done():
		return "", ctx.Err()
	}
	if o.model == "" {
		return product, nil
	}
	body, _ := json.Marshal(object{"model": o.model, "messages": []object{{"role": "user", "content": question}}})
	// The attempt key names the attempt: the proxy records the call for it, and refuses the key once it ends.
	call := &llmproxyv1.CompleteRequest{Path: "/v1/chat/completions", BodyJson: body}
	answer, err := store.completions.Complete(ctx, call)
	if err != nil {
		return "", err
	}
	// A refusal by the backend or the proxy is an answer with its HTTP status, not an error of the rpc.
	if answer.HttpStatus != 200 {
		code := "FAILED"
		if answer.HttpStatus >= 500 {
			code = "UNAVAILABLE"
		}
		said := fmt.Sprintf("the model answered %d: %s", answer.HttpStatus, answer.BodyJson)
		return "", &fulmenError{Code: code, Message: said}
	}
	var completion struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if err := json.Unmarshal(answer.BodyJson, &completion); err != nil {
		return "", err
	}
	return completion.Choices[0].Message.Content, nil
}

// reportSpan appends one span and waits until it is durable, so that readers of the finished attempt find it.
func reportSpan(
	ctx context.Context, store *connection, attempt string, began time.Time, about map[string]string,
) error {
	ended := time.Now()
	span := &tracev1.Span{
		TraceId: random(16), SpanId: random(8), Name: "solve",
		StartTimeUnixNano: uint64(began.UnixNano()), EndTimeUnixNano: uint64(ended.UnixNano()),
	}
	for key, value := range about {
		text := &commonv1.AnyValue{Value: &commonv1.AnyValue_StringValue{StringValue: value}}
		span.Attributes = append(span.Attributes, &commonv1.KeyValue{Key: key, Value: text})
	}
	otlp, err := proto.Marshal(span)
	if err != nil {
		return err
	}
	payload, err := proto.Marshal(&storev1.SpanBatch{Spans: []*storev1.SpanRecord{{OtlpSpan: otlp, Scope: "client"}}})
	if err != nil {
		return err
	}
	return appendChunk(ctx, store, &storev1.SpanChunk{
		Attempt: attempt, SpanCount: 1, Codec: storev1.SpanCodec_SPAN_CODEC_IDENTITY, Payload: payload,
		ChunkId:   uuid(), // a chunk that is sent again with the same id is stored once
		StartTime: timestamppb.New(began), EndTime: timestamppb.New(ended),
	})
}

func appendChunk(ctx context.Context, store *connection, chunk *storev1.SpanChunk) error {
	stream, err := store.spans.AppendSpans(ctx)
	if err != nil {
		return err
	}
	_ = stream.Send(&storev1.AppendSpansRequest{Chunks: []*storev1.SpanChunk{chunk}}) // Recv returns the error
	_ = stream.CloseSend()
	for {
		answer, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for _, rejected := range answer.Rejected {
			return fmt.Errorf("the store rejected the span: %s", rejected.Message)
		}
	}
}

func random(size int) []byte {
	bytes := make([]byte, size)
	_, _ = rand.Read(bytes) // never fails where this runs
	return bytes
}

func uuid() string {
	b := random(16)
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80 // version 4
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
