package main

import (
	"errors"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
)

// fulmenError is what a server refused, or what gRPC could not do; Reason is empty where no server said one.
type fulmenError struct {
	Code     string            `json:"code"`
	Reason   string            `json:"reason"`
	Message  string            `json:"message"`
	Metadata map[string]string `json:"metadata"`
}

func (e *fulmenError) Error() string { return e.Code + ": " + e.Message }

// unreachable tells whether nobody answered, or the connection broke: gRPC says INTERNAL of that too, but servers never
// do without a reason.
func (e *fulmenError) unreachable() bool {
	return e.Code == "UNAVAILABLE" || (e.Code == "INTERNAL" && e.Reason == "")
}

// decoded turns what a call returned into a fulmenError; what is no error of a call has the code FAILED.
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
