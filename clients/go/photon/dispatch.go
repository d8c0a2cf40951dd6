package photon

import (
	"context"
	"crypto/sha256"
	"errors"
	"sync"

	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/photon-grpc/photon-grpc/clients/go/photonv1"
)

const (
	// A descriptor set of more bytes is sent once, then by its digest.
	maxSetBytes = 4 << 10
	// Digests that a client remembers.
	maxDigests = 1024
	// Calls with the set itself after one whose digest was not known, where another balancer than ours gives the replicas
	// their turns: then each of as many gets it. Otherwise it could go to the same one every time.
	maxRepeats = 16
)

// digest is the SHA-256 of a descriptor set.
type digest [sha256.Size]byte

// sentSets are the descriptor sets that servers of a client took. One that has lost a set says so.
type sentSets struct {
	mu sync.Mutex
	// For each, how many calls must have the set itself before its digest is enough.
	owed map[digest]int
	// Digests are of no use: servers cannot be asked whether they know them.
	isOff bool
}

// has reports whether a call may have the digest.
func (s *sentSets) has(set digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	owed, isSent := s.owed[set]
	if owed > 0 {
		s.owed[set]--
	}
	return isSent && owed == 0 && !s.isOff
}

func (s *sentSets) owe(set digest, num int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.owed[set] = num
}

func (s *sentSets) add(set digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owed == nil || len(s.owed) >= maxDigests {
		s.owed = map[digest]int{}
	}
	if _, isSent := s.owed[set]; !isSent {
		s.owed[set] = 0
	}
}

func (s *sentSets) turnOff() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.isOff = true
}

// dispatch is a request in the form in which it is sent.
type dispatch struct {
	admission
	whole *pb.GenerateRequest
	// The whole, or the whole with a digest in place of its descriptor set.
	message *pb.GenerateRequest
	// Of a large descriptor set; nil: there is none.
	set *digest
}

func (c *Client) newDispatch(request *pb.GenerateRequest) *dispatch {
	d := &dispatch{admission: admission{client: c}, whole: request, set: largeSet(request)}
	if d.set != nil && c.sets.has(*d.set) {
		d.use(withDigest(request, *d.set))
	} else {
		d.use(request)
	}
	return d
}

func (d *dispatch) use(message *pb.GenerateRequest) {
	d.message, d.guard = message, nil
	d.field = firstCautious(message.ProtoReflect(), cautiousOfGenerate)
}

func (d *dispatch) isShort() bool { return d.message != d.whole }

// context makes the context of an attempt.
func (d *dispatch) context(ctx context.Context) (context.Context, error) {
	own, err := d.admission.context(ctx)
	if err != nil && d.isShort() {
		d.giveUpDigest(err)
		return d.admission.context(ctx)
	}
	return own, err
}

// again reports whether to send a request that failed before its answer again at once, perhaps in another form.
func (d *dispatch) again(ctx context.Context, failure error) (bool, error) {
	if d.isShort() && errors.Is(failure, DescriptorSetUnknown) {
		switch {
		case !d.client.choosesReplicas.Load():
			d.client.sets.owe(*d.set, maxRepeats)
		case d.guard != nil:
			// In turn, the set would go to one that has it, and the next digest to this one again.
			d.near = d.guard.chosen.Load()
		}
		d.use(d.whole)
		return true, nil
	}
	isAgain, err := d.admission.again(ctx, failure)
	if isAgain || !d.isShort() {
		return isAgain, err
	}
	if isAsking := err != failure; isAsking || errors.Is(err, errIgnored) {
		d.giveUpDigest(err)
		return true, nil
	}
	return false, err
}

// giveUpDigest sends the whole, which servers of any release understand.
func (d *dispatch) giveUpDigest(why error) {
	if errors.Is(why, NotAllowed) {
		d.client.sets.turnOff()
	}
	d.use(d.whole)
}

// arrived is called when an answer came.
func (d *dispatch) arrived() {
	if d.set != nil && !d.isShort() {
		d.client.sets.add(*d.set)
	}
}

// largeSet gives the digest of a request's descriptor set.
func largeSet(request *pb.GenerateRequest) *digest {
	typed := request.GetStructuredOutput().GetProtobuf()
	if len(typed.GetFileDescriptorSet()) <= maxSetBytes || len(typed.GetFileDescriptorSetSha256()) > 0 {
		return nil
	}
	set := digest(sha256.Sum256(typed.FileDescriptorSet))
	return &set
}

// withDigest copies a request, which shares all else with the copy.
func withDigest(request *pb.GenerateRequest, set digest) *pb.GenerateRequest {
	short := &pb.GenerateRequest{}
	from, to := request.ProtoReflect(), short.ProtoReflect()
	from.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		to.Set(field, value)
		return true
	})
	to.SetUnknown(from.GetUnknown())
	typed := &pb.StructuredOutput_Protobuf{
		MessageType:             request.StructuredOutput.GetProtobuf().MessageType,
		FileDescriptorSetSha256: set[:],
	}
	short.StructuredOutput = &pb.StructuredOutput{Constraint: &pb.StructuredOutput_Protobuf_{Protobuf: typed}}
	return short
}
