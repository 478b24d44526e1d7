// Package blobd opens models from a blobd daemon and maps their tensors without a copy.
//
//	model, err := blobd.Open("llama3:8b")
//	if err != nil {
//		return err
//	}
//	defer model.Close()
//	weights, err := model.Map("blk.0.attn_q.weight") // a []byte of the page cache
//
// A model is in use until it is closed. Mappings stay valid after that, when the daemon stops and
// when the model is removed. Mapped memory is read-only: writing to it kills the program. The package
// needs only the standard library and no cgo, starts no goroutine and keeps no global state.
//
// docs/PROTOCOL.md in blobd's repository is the protocol's specification.
package blobd
