package blobd

import (
	"fmt"
	"os"
	"testing"
)

// TestDefaultDaemonForOthers prints what a client without a socket finds, for the integration tests, which compare all
// languages on machines with and without a daemon for all users.
func TestDefaultDaemonForOthers(t *testing.T) {
	if os.Getenv("BLOBD_TEST_DEFAULT") == "" {
		t.Skip("only for the integration tests")
	}
	models, err := (&Client{}).Models()
	switch {
	case err != nil:
		fmt.Println("found:", CodeOf(err))
	case len(models) == 0:
		fmt.Println("found:")
	default:
		fmt.Println("found:", models[0].Name)
	}
}
