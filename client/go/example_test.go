package blobd_test

import (
	"fmt"

	"blobd"
)

// Needs a daemon, so it is compiled and not run.
func ExampleOpen() {
	model, err := blobd.Open("llama3:8b")
	if err != nil {
		fmt.Println(err) // if no daemon runs, it says how to start one
		return
	}
	defer model.Close()

	for _, tensor := range model.Tensors() { // lists the tensors without mapping them
		fmt.Println(tensor.Name, tensor.Type, tensor.Shape, tensor.Size, tensor.Layer)
	}
	weights, err := model.Map("blk.0.attn_q.weight") // a []byte of the page cache
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("% x\n", weights[:8])
}
