package blobd

import (
	"crypto/rand"
	"encoding/hex"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// maxPrefixBytes leaves room for the point and any number: an ID has at most 64 bytes.
const maxPrefixBytes = 43

// requestIDs makes the IDs of a client's requests: a prefix, a point and a number. Its zero value is
// ready for use.
type requestIDs struct {
	once   sync.Once
	random string
	count  atomic.Uint64
}

// next returns a new ID. It starts with this prefix or, if that is empty, with the client's own random digits.
func (ids *requestIDs) next(prefix string) (string, error) {
	if prefix == "" {
		ids.once.Do(func() { ids.random = randomDigits() })
		prefix = ids.random
	} else if !isRequestPrefix(prefix) {
		return "", &failure{
			kind: ErrRequestPrefix,
			text: "RequestPrefix: expected 1 to " + strconv.Itoa(maxPrefixBytes) + " letters, digits, `.`, `-` and `_`",
			code: CodeInvalidRequest,
		}
	}
	return prefix + "." + strconv.FormatUint(ids.count.Add(1), 10), nil
}

func randomDigits() string {
	var random [6]byte
	// An ID is no secret: without randomness, zeros are good enough.
	rand.Read(random[:])
	return hex.EncodeToString(random[:])
}

func isRequestPrefix(text string) bool {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_"
	return len(text) <= maxPrefixBytes && strings.Trim(text, allowed) == ""
}
