package photon

import (
	"encoding/json"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// partialJSON makes a JSON object of the beginning of one: members whose values are whole, strings as far as they are
// written, and what is open closed. Strings that are no text of a message (enums, numbers of 64 bits, timestamps) are
// left out until they are whole.
func partialJSON(text string, message protoreflect.MessageDescriptor) string {
	p := &partial{rest: strings.TrimLeft(text, " \t\r\n")}
	if p.value(ofMessage(message)) == absent {
		return "{}"
	}
	return string(p.out)
}

// lastKeyWins writes JSON anew with each key of an object once, with its last value: protojson refuses to read a key twice.
func lastKeyWins(text string) []byte {
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	var value any
	if decoder.Decode(&value) != nil || decoder.More() {
		return []byte(text)
	}
	once, err := json.Marshal(value)
	if err != nil {
		return []byte(text)
	}
	return once
}

// progress says how much of a value is there.
type progress int

const (
	absent progress = iota
	begun           // and closed in the output
	whole
)

// shape is what is known of a value from its field.
type shape struct {
	// An object with these fields; nil: a map or a list of each, or a scalar.
	message protoreflect.MessageDescriptor
	each    *shape
	// A string that makes sense before it is whole.
	grows bool
}

var anything = func() *shape {
	s := &shape{grows: true}
	s.each = s
	return s
}()

func ofMessage(message protoreflect.MessageDescriptor) *shape {
	switch message.FullName() {
	case "google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue", "google.protobuf.StringValue":
		return anything
	}
	if message.ParentFile().Package() == "google.protobuf" {
		return &shape{}
	}
	return &shape{message: message}
}

func ofField(field protoreflect.FieldDescriptor) *shape {
	if field.IsMap() {
		return &shape{each: ofValue(field.MapValue())}
	}
	if field.IsList() {
		return &shape{each: ofValue(field)}
	}
	return ofValue(field)
}

func ofValue(field protoreflect.FieldDescriptor) *shape {
	if field.Message() != nil {
		return ofMessage(field.Message())
	}
	return &shape{grows: field.Kind() == protoreflect.StringKind}
}

func (s *shape) member(key string) *shape {
	if s.message != nil {
		if field := s.message.Fields().ByJSONName(key); field != nil {
			return ofField(field)
		}
		return &shape{}
	}
	return s.element()
}

func (s *shape) element() *shape {
	if s.each == nil {
		return &shape{}
	}
	return s.each
}

type partial struct {
	rest string
	out  []byte
}

func (p *partial) value(s *shape) progress {
	switch {
	case p.rest == "":
		return absent
	case p.rest[0] == '{':
		return p.container('}', func() progress { return p.memberOf(s) })
	case p.rest[0] == '[':
		return p.container(']', func() progress { return p.value(s.element()) })
	case p.rest[0] == '"':
		return p.text(s.grows)
	}
	return p.scalar()
}

// container copies an object or a list up to the first item that is not whole.
func (p *partial) container(end byte, item func() progress) progress {
	p.copy(1)
	for {
		p.rest = strings.TrimLeft(p.rest, " \t\r\n")
		if p.rest != "" && p.rest[0] == end {
			p.copy(1)
			return whole
		}
		before := len(p.out)
		if p.rest != "" && p.rest[0] == ',' {
			p.copy(1)
			p.rest = strings.TrimLeft(p.rest, " \t\r\n")
		}
		switch item() {
		case whole:
			continue
		case absent:
			p.out = p.out[:before]
		}
		p.out = append(p.out, end)
		return begun
	}
}

func (p *partial) memberOf(s *shape) progress {
	if p.rest == "" || p.rest[0] != '"' {
		return absent
	}
	start := len(p.out)
	if p.text(false) != whole {
		return absent
	}
	key := string(p.out[start+1 : len(p.out)-1])
	p.rest = strings.TrimLeft(p.rest, " \t\r\n")
	if p.rest == "" || p.rest[0] != ':' {
		return absent
	}
	p.copy(1)
	p.rest = strings.TrimLeft(p.rest, " \t\r\n")
	return p.value(s.member(key))
}

// text copies a string; one that grows is closed where it is cut, without an escape that is cut.
func (p *partial) text(grows bool) progress {
	safe := 1
	for i := 1; i < len(p.rest); {
		switch p.rest[i] {
		case '"':
			p.copy(i + 1)
			return whole
		case '\\':
			i += escapeLength(p.rest[i:])
		default:
			i++
		}
		if i <= len(p.rest) {
			safe = i
		}
	}
	if !grows {
		return absent
	}
	p.copy(safe)
	p.out = append(p.out, '"')
	return begun
}

// escapeLength of an escape: of a surrogate with its other half.
func escapeLength(text string) int {
	switch {
	case len(text) < 2 || text[1] != 'u':
		return 2
	case len(text) > 3 && strings.ContainsRune("dD", rune(text[2])) && strings.ContainsRune("89abAB", rune(text[3])):
		return 12
	}
	return 6
}

// scalar copies a number, true, false or null once something follows it.
func (p *partial) scalar() progress {
	n := strings.IndexAny(p.rest, ",]} \t\r\n")
	if n <= 0 {
		return absent
	}
	p.copy(n)
	return whole
}

func (p *partial) copy(n int) {
	p.out = append(p.out, p.rest[:n]...)
	p.rest = p.rest[n:]
}
