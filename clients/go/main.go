// A client of Fulmen in one program: `client COMMAND [--flag value]...`. docs/clients.md explains commands and flags.
//
// Prints one JSON object per line. Errors are printed to stderr, with the exit status 1 (2: invalid command line).
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

type object map[string]any

type options struct {
	project, trainingRun, groupID, requestID, label, input, cursor, model string
	count, slots                                                          int
	workS, deadlineS                                                      float64
}

var commands = map[string]func(context.Context, *connection, options) error{
	"create": create,
	"run":    run,
	"watch":  watch,
}

func read(arguments []string) (command string, files []string, o options, err error) {
	if len(arguments) == 0 {
		return "", nil, o, fmt.Errorf("no command")
	}
	command = arguments[0]
	if commands[command] == nil && command != "vectors" {
		return "", nil, o, fmt.Errorf("unknown command: %s", command)
	}
	flags := flag.NewFlagSet(command, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&o.project, "project", "projects/default", "")
	flags.StringVar(&o.trainingRun, "training-run", "", "")
	flags.StringVar(&o.groupID, "group-id", "", "")
	flags.StringVar(&o.requestID, "request-id", "", "")
	flags.StringVar(&o.label, "label", "", "")
	flags.StringVar(&o.input, "input", `{"question": "6*7="}`, "")
	flags.StringVar(&o.cursor, "cursor", "", "")
	flags.StringVar(&o.model, "model", "", "")
	flags.IntVar(&o.count, "count", 1, "")
	flags.IntVar(&o.slots, "slots", 1, "")
	flags.Float64Var(&o.workS, "work-s", 0, "")
	flags.Float64Var(&o.deadlineS, "deadline-s", 60, "")
	err = flags.Parse(arguments[1:])
	return command, flags.Args(), o, err
}

// labels returns labels that rollouts require of a runner, or that a runner has.
func (o options) labels() map[string]string {
	key, value, found := strings.Cut(o.label, "=")
	if !found {
		return nil
	}
	return map[string]string{key: value}
}

func perform(command string, files []string, o options) error {
	if command == "vectors" {
		return checkAll(files)
	}
	token, err := ownToken()
	if err != nil {
		return err
	}
	store, err := connect()
	if err != nil {
		return err
	}
	// The deadline of all calls.
	ctx, cancel := context.WithTimeout(as(context.Background(), token), seconds(o.deadlineS))
	defer cancel()
	return commands[command](ctx, store, o)
}

func main() {
	command, files, o, err := read(os.Args[1:])
	if err != nil {
		fail(2, &fulmenError{Code: "USAGE", Message: err.Error(), Metadata: map[string]string{}})
	}
	if err := perform(command, files, o); err != nil {
		fail(1, decoded(err))
	}
}

func emit(event object) {
	line, _ := json.Marshal(event) // strings, numbers and lists of them
	fmt.Println(string(line))
}

func fail(status int, err *fulmenError) {
	line, _ := json.Marshal(object{"error": err})
	fmt.Fprintln(os.Stderr, string(line))
	os.Exit(status)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
