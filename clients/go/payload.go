package main

// Decodes exchanged gradients as described in docs/exchange-wire.md.

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"

	"google.golang.org/protobuf/proto"

	algorithmv1 "fulmen.dev/client/stubs/fulmen/algorithm/v1"
)

const (
	blockSize  = 4096
	scaledSize = 512
	mostParts  = 8
	asTheyAre  = "sum" // the codec's name for tensors that are not encoded

	int8Kind     = algorithmv1.PayloadPart_KIND_INT8
	uint8Kind    = algorithmv1.PayloadPart_KIND_UINT8
	int16Kind    = algorithmv1.PayloadPart_KIND_INT16
	bfloat16Kind = algorithmv1.PayloadPart_KIND_BFLOAT16
	float16Kind  = algorithmv1.PayloadPart_KIND_FLOAT16
	float32Kind  = algorithmv1.PayloadPart_KIND_FLOAT32
)

// An invalid payload; no part of it may be used.
var errRefused = errors.New("refused")

// expected is what the reader knows beforehand; a payload that differs is refused.
type expected struct {
	codec               string
	version, size, bits int
}

// element is the place and value of an element that is not zero.
type element = [2]float64

type part struct {
	kind    algorithmv1.PayloadPart_Kind
	numbers []float64
}

func decode(data []byte, e expected) ([]element, error) {
	header, parts, ok := parse(data)
	if !ok || header.Codec != e.codec || int(header.CodecVersion) != e.version || int(header.ElementCount) != e.size {
		return nil, errRefused
	}
	var dense []element
	switch e.codec {
	case asTheyAre:
		dense, ok = whole(parts, e.size)
	case "topk", "dgc":
		dense, ok = sparse(parts, e.size)
	case "union":
		dense, ok = union(parts, e.size)
	case "qsgd", "double_quantization":
		dense, ok = quantised(parts, e.size, e.bits)
	case "topk_quantised":
		dense, ok = sparseQuantised(parts, e.size, e.bits)
	default:
		return nil, errors.New("unknown codec: " + e.codec)
	}
	if !ok {
		return nil, errRefused
	}
	elements := []element{}
	for _, one := range dense {
		if one[1] != 0 {
			elements = append(elements, one)
		}
	}
	return elements, nil
}

// parse reads the frame: header and parts, each with its kind and numbers.
func parse(data []byte) (*algorithmv1.PayloadHeader, []part, bool) {
	if len(data) < 12 || string(data[:4]) != "FGX1" {
		return nil, nil, false
	}
	if crc32.ChecksumIEEE(data[8:]) != binary.LittleEndian.Uint32(data[4:]) {
		return nil, nil, false
	}
	length, rest := int(binary.LittleEndian.Uint32(data[8:])), data[12:]
	header := &algorithmv1.PayloadHeader{}
	if length > len(rest) || proto.Unmarshal(rest[:length], header) != nil || len(header.Parts) > mostParts {
		return nil, nil, false
	}
	rest = rest[length:]
	parts := []part{}
	for _, each := range header.Parts {
		size := sizeOf(each.Kind)
		if size == 0 || each.Count < 0 || each.Count > int64(len(rest)/size) {
			return nil, nil, false
		}
		numbers := make([]float64, each.Count)
		for i := range numbers {
			numbers[i] = number(each.Kind, rest[i*size:])
			if header.Codec != asTheyAre && (math.IsNaN(numbers[i]) || math.IsInf(numbers[i], 0)) {
				return nil, nil, false
			}
		}
		parts, rest = append(parts, part{each.Kind, numbers}), rest[len(numbers)*size:]
	}
	return header, parts, len(rest) == 0
}

func sizeOf(kind algorithmv1.PayloadPart_Kind) int {
	switch kind {
	case int8Kind, uint8Kind:
		return 1
	case int16Kind, bfloat16Kind, float16Kind:
		return 2
	case float32Kind:
		return 4
	}
	return 0
}

func number(kind algorithmv1.PayloadPart_Kind, data []byte) float64 {
	switch kind {
	case int8Kind:
		return float64(int8(data[0]))
	case uint8Kind:
		return float64(data[0])
	case int16Kind:
		return float64(int16(binary.LittleEndian.Uint16(data)))
	case bfloat16Kind:
		return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(data)) << 16))
	case float16Kind:
		return float16(binary.LittleEndian.Uint16(data))
	}
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(data)))
}

// float16 reads binary16 of IEEE 754.
func float16(bits uint16) float64 {
	exponent, fraction := int(bits>>10&31), float64(bits&1023)
	value := math.Ldexp(1+fraction/1024, exponent-15)
	switch {
	case exponent == 0:
		value = math.Ldexp(fraction, -24)
	case exponent == 31 && fraction != 0:
		value = math.NaN()
	case exponent == 31:
		value = math.Inf(1)
	}
	return math.Copysign(value, 1-float64(bits>>15)*2)
}

func areOf(parts []part, kinds ...algorithmv1.PayloadPart_Kind) bool {
	if len(parts) != len(kinds) {
		return false
	}
	for i, kind := range kinds {
		if parts[i].kind != kind {
			return false
		}
	}
	return true
}

func packedKind(bits int) algorithmv1.PayloadPart_Kind {
	if bits == 8 {
		return int8Kind
	}
	return uint8Kind
}

// integers reads integers of this many bits: plain, or as planes of bits.
func integers(packed []float64, bits, count int) ([]float64, bool) {
	if bits == 8 {
		return packed, len(packed) == count
	}
	if len(packed) != blocks(count, 8)*bits {
		return nil, false
	}
	found := make([]float64, count)
	for i := range found {
		whole := 0
		for bit := 0; bit < bits; bit++ {
			whole |= int(packed[i/8*bits+bit]) >> (i % 8) & 1 << bit
		}
		if whole >= 1<<(bits-1) {
			whole -= 1 << bits
		}
		found[i] = float64(whole)
	}
	return found, true
}

// placed returns the elements that the counts and places describe, in order.
func placed(counts, places []float64, size int) ([]int, bool) {
	if len(counts) != blocks(size, blockSize) {
		return nil, false
	}
	elements, next := make([]int, 0, len(places)), 0
	for block, count := range counts {
		end, last := next+int(count), -1
		if count < 0 || count > blockSize || end > len(places) {
			return nil, false
		}
		for _, each := range places[next:end] {
			place := int(each)
			if place <= last || place >= blockSize || block*blockSize+place >= size {
				return nil, false
			}
			last = place
			elements = append(elements, block*blockSize+place)
		}
		next = end
	}
	return elements, next == len(places)
}

// whole reads an unencoded tensor of any kind of number. Only its numbers need not be finite.
func whole(parts []part, size int) ([]element, bool) {
	if len(parts) != 1 || len(parts[0].numbers) != size {
		return nil, false
	}
	found := make([]element, size)
	for i, value := range parts[0].numbers {
		found[i] = element{float64(i), value}
	}
	return found, true
}

// union reads the sum of the ranks' payloads: without places if these would take more bytes.
func union(parts []part, size int) ([]element, bool) {
	if areOf(parts, bfloat16Kind) {
		return whole(parts, size)
	}
	return sparse(parts, size)
}

func sparse(parts []part, size int) ([]element, bool) {
	if !areOf(parts, int16Kind, int16Kind, bfloat16Kind) {
		return nil, false
	}
	values := parts[2].numbers
	places, ok := placed(parts[0].numbers, parts[1].numbers, size)
	if !ok || len(values) != len(places) {
		return nil, false
	}
	found := make([]element, len(places))
	for i, place := range places {
		found[i] = element{float64(place), values[i]}
	}
	return found, true
}

func quantised(parts []part, size, bits int) ([]element, bool) {
	if areOf(parts, float32Kind) {
		return whole(parts, size)
	}
	found := make([]element, size)
	if !areOf(parts, packedKind(bits), float32Kind) {
		return nil, false
	}
	steps, ok := integers(parts[0].numbers, bits, size)
	scales := parts[1].numbers
	if !ok || len(scales) != blocks(size, scaledSize) || !areScales(scales, bits, 0) {
		return nil, false
	}
	for i, step := range steps {
		found[i] = element{float64(i), product(step, scales[i/scaledSize])}
	}
	return found, true
}

func sparseQuantised(parts []part, size, bits int) ([]element, bool) {
	if len(parts) == 3 {
		return sparse(parts, size)
	}
	if !areOf(parts, int16Kind, int16Kind, packedKind(bits), bfloat16Kind) {
		return nil, false
	}
	counts, scales := parts[0].numbers, parts[3].numbers
	places, ok := placed(counts, parts[1].numbers, size)
	steps, fit := integers(parts[2].numbers, bits, len(places))
	if !ok || !fit || !areScales(scales, bits, math.SmallestNonzeroFloat32) {
		return nil, false
	}
	found, next := make([]element, len(places)), 0
	for _, count := range counts {
		if count == 0 {
			continue
		}
		if len(scales) == 0 {
			return nil, false
		}
		for ; count > 0; count-- {
			step := steps[next]
			if step >= 0 {
				step++ // no element that is sent is zero
			}
			found[next] = element{float64(places[next]), product(step, scales[0])}
			next++
		}
		scales = scales[1:]
	}
	return found, len(scales) == 0
}

func areScales(scales []float64, bits int, least float64) bool {
	for _, scale := range scales {
		if scale < least || math.IsInf(product(scale, float64(int(1)<<(bits-1))), 0) {
			return false
		}
	}
	return true
}

// product multiplies in float32, so that all readers compute the same bits.
func product(left, right float64) float64 { return float64(float32(left) * float32(right)) }

func blocks(count, size int) int { return (count + size - 1) / size }
