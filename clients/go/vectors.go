package main

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
)

// goldenFile is a file of protos/testdata/exchange.
type goldenFile struct {
	Codec   string
	Version int
	Cases   map[string]struct {
		encoding
		Payload string
		Decoded []element
		Cuts    []int
		Segment int
	}
	Refused struct {
		encoding
		Size     int
		Payloads map[string]string
	}
}

type encoding struct {
	Codec    string
	Settings struct {
		Bits     int
		BitsUp   int `json:"bits_up"`
		BitsDown int `json:"bits_down"`
	}
	Way string
}

func (f *goldenFile) expected(e encoding, size int) expected {
	known := expected{codec: e.Codec, version: f.Version, size: size, bits: e.Settings.Bits}
	if known.bits == 0 && e.Way == "up" {
		known.bits = e.Settings.BitsUp
	} else if known.bits == 0 {
		known.bits = e.Settings.BitsDown
	}
	return known
}

// checkAll checks the decoder of payloads against files, until the first payload whose result differs from its file.
func checkAll(files []string) error {
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var golden goldenFile
		if err := json.Unmarshal(text, &golden); err != nil {
			return err
		}
		if err := golden.check(); err != nil {
			return fmt.Errorf("%s: %w", golden.Codec, err)
		}
		emit(object{"codec": golden.Codec, "decoded": len(golden.Cases), "refused": len(golden.Refused.Payloads)})
	}
	return nil
}

func (f *goldenFile) check() error {
	for name, each := range f.Cases {
		found, err := decodeHex(each.Payload, f.expected(each.encoding, each.Cuts[each.Segment+1]-each.Cuts[each.Segment]))
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if !reflect.DeepEqual(found, each.Decoded) {
			return fmt.Errorf("%s: the elements differ from the file", name)
		}
	}
	for why, payload := range f.Refused.Payloads {
		if _, err := decodeHex(payload, f.expected(f.Refused.encoding, f.Refused.Size)); err != errRefused {
			return fmt.Errorf("not refused: %s", why)
		}
	}
	return nil
}

func decodeHex(text string, known expected) ([]element, error) {
	data, err := hex.DecodeString(text)
	if err != nil {
		return nil, err
	}
	return decode(data, known)
}
