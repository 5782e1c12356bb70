package main

import (
	"errors"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
)

// fulmenError is a server's refusal, or a failure of gRPC; Reason is empty if no server sent one.
type fulmenError struct {
	Code     string            `json:"code"`
	Reason   string            `json:"reason"`
	Message  string            `json:"message"`
	Metadata map[string]string `json:"metadata"`
}

func (e *fulmenError) Error() string { return e.Code + ": " + e.Message }

// unreachable returns whether no server answered, or the connection broke. gRPC may report that as INTERNAL, too; a
// server's INTERNAL always has a reason.
func (e *fulmenError) unreachable() bool {
	return e.Code == "UNAVAILABLE" || (e.Code == "INTERNAL" && e.Reason == "")
}

// decoded turns an error into a fulmenError; errors other than a call's have the code FAILED.
func decoded(err error) *fulmenError {
	var known *fulmenError
	if errors.As(err, &known) {
		return known
	}
	found, ok := status.FromError(err)
	if !ok {
		return &fulmenError{Code: "FAILED", Message: err.Error(), Metadata: map[string]string{}}
	}
	known = &fulmenError{Code: code.Code(found.Code()).String(), Message: found.Message(), Metadata: map[string]string{}}
	for _, detail := range found.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			known.Reason, known.Metadata = info.Reason, info.Metadata
		}
	}
	return known
}
