package blobd

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

func TestNamesAreSplitAsOllamaSplitsThem(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "tests", "layer_names.json"))
	var table [][3]string
	if err == nil {
		err = json.Unmarshal(text, &table)
	}
	if err != nil || len(table) < 10 {
		t.Fatal(len(table), err)
	}
	for _, row := range table {
		if layer, rest := SplitName(row[0]); layer != row[1] || rest != row[2] {
			t.Error(row, layer, rest)
		}
	}
}

func TestTensorsAreGroupedByLayer(t *testing.T) {
	names := []string{"blk.0.attn_q.weight", "token_embd.weight", "blk.0.attn_k.weight", "blk.1.attn_q.weight"}
	tensors := []Tensor{}
	for _, name := range names {
		tensors = append(tensors, Tensor{Name: name})
	}
	layers := GroupLayers(tensors)
	if len(layers) != 3 || len(layers["blk.0"]) != 2 || layers["blk.0"]["attn_q.weight"].Name != names[0] {
		t.Error(layers)
	}
}

func TestBlockNumbersAreReadFromNames(t *testing.T) {
	for name, expected := range map[string]uint64{"blk.31.attn_q.weight": 31, "blk.0.": 0} {
		if number, ok := BlockNumber(name); !ok || number != expected {
			t.Error(name, number)
		}
	}
	for _, name := range []string{"blk.31", "v.blk.3.attn_q", "blk.-1.x", "blk.+1.x", "blk..x", "blk.x.y", "output.weight",
		"blk.99999999999999999999.x"} {
		if number, ok := BlockNumber(name); ok {
			t.Error(name, number)
		}
	}
}
