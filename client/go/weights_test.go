package blobd

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
)

const (
	tensorType = "application/vnd.ollama.image.tensor"
	jsonType   = "application/vnd.ollama.image.json"
)

// layerTable is the table that the tests of all clients read.
type layerTable struct {
	Models []struct {
		Name       string
		Layers     []tableLayer
		JSON       map[string]json.RawMessage
		Components []string
		Opened     []tableResult
	}
	Refused []struct {
		What string
		tableLayer
	}
}

type tableLayer struct {
	Name     string
	Metadata map[string]string
	Tensors  [][3]json.RawMessage
	Header   *string
	Data     int
	Length   *uint64
	FileOf   *int `json:"file_of"`
}

type tableResult struct {
	Component    string
	Error, Words string
	Quantization [2]any
	Tensors      map[string]struct {
		Dtype        string
		Shape        []uint64
		Layer        int
		Start, Size  uint64
		Part         bool
		Quantization *[2]any
	}
	Groups map[string][]string
}

// namedFile is a layer of a fake model.
type namedFile struct {
	mediaType, name string
	content         []byte
}

func readTable(t *testing.T) (table layerTable) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "tests", "tensor_layers.json"))
	if err == nil {
		err = json.Unmarshal(text, &table)
	}
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// dataOf is a part of the data of the layer with this number.
func dataOf(number int, start, size uint64) []byte {
	data := make([]byte, size)
	for place := range data {
		data[place] = byte((start+uint64(place)+17*uint64(number))%250 + 1)
	}
	return data
}

// file is the file of the layer with this number.
func (l tableLayer) file(t *testing.T, number int) []byte {
	t.Helper()
	header, size := "", uint64(l.Data)
	if l.Header != nil {
		header = *l.Header
	} else {
		header, size = l.writtenHeader(t)
	}
	length := uint64(len(header))
	if l.Length != nil {
		length = *l.Length
	}
	if l.FileOf != nil {
		number = *l.FileOf
	}
	file := append(binary.LittleEndian.AppendUint64(nil, length), header...)
	return append(file, dataOf(number, 0, size)...)
}

func (l tableLayer) writtenHeader(t *testing.T) (header string, size uint64) {
	t.Helper()
	fields := map[string]any{}
	if l.Metadata != nil {
		fields["__metadata__"] = l.Metadata
	}
	for _, tensor := range l.Tensors {
		var name, dtype string
		var shape []uint64
		for place, into := range []any{&name, &dtype, &shape} {
			if err := json.Unmarshal(tensor[place], into); err != nil {
				t.Fatal(err)
			}
		}
		bits := dtypeBits[dtype]
		for _, length := range shape {
			bits *= length
		}
		fields[name] = map[string]any{"dtype": dtype, "shape": shape, "data_offsets": []uint64{size, size + bits/8}}
		size += bits / 8
	}
	text, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	return string(text), size
}

// serveFiles serves a model of these files.
func serveFiles(t *testing.T, files []namedFile) *Client {
	return fakeDaemon(t, func(p *peer) {
		layers, fds := []string{}, []int{}
		for number, file := range files {
			text, _ := json.Marshal(map[string]any{
				"media_type": file.mediaType, "name": file.name, "size": len(file.content), "fd": number,
				"digest": fmt.Sprintf("sha256:%x", sha256.Sum256(file.content)), "piece_count": 0,
			})
			layers = append(layers, string(text))
			fds = append(fds, fileWith(file.content))
		}
		p.head(0, len(fds), layers...)
		p.frame(fmt.Sprintf(`{"fds":{"first":0,"count":%d}}`, len(fds)), fds...)
		closeAll(fds)
		p.waitForClose()
	})
}

// fileWith is a descriptor of an unlinked file with this content.
func fileWith(content []byte) int {
	fd := fileOf(0)
	for len(content) > 0 {
		count, err := syscall.Write(fd, content)
		if err != nil {
			panic(err)
		}
		content = content[count:]
	}
	return fd
}

func quantPair(found Quantization) [2]any {
	pair := [2]any{}
	if found.Type != "" {
		pair[0] = found.Type
	}
	if found.GroupSize != 0 {
		pair[1] = float64(found.GroupSize)
	}
	return pair
}

func TestTableOfTensorLayers(t *testing.T) {
	table := readTable(t)
	if len(table.Models) != 22 {
		t.Fatal(len(table.Models), "models in the table")
	}
	for _, model := range table.Models {
		t.Run(model.Name, func(t *testing.T) {
			files := []namedFile{}
			for number, layer := range model.Layers {
				files = append(files, namedFile{tensorType, layer.Name, layer.file(t, number)})
			}
			for name, text := range model.JSON {
				files = append(files, namedFile{jsonType, name, text})
			}
			client := serveFiles(t, files)
			for _, expected := range model.Opened {
				weights, err := client.OpenWeights("m", expected.Component)
				if expected.Error != "" {
					if CodeOf(err) != Code(expected.Error) || !strings.Contains(fmt.Sprint(err), expected.Words) {
						t.Errorf("component %q: %v", expected.Component, err)
					}
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(weights.Components(), model.Components) {
					t.Error(weights.Components())
				}
				for path, text := range model.JSON {
					var found, document any
					if ok, err := weights.JSON(path, &found); !ok || err != nil {
						t.Error(path, err)
					}
					if json.Unmarshal(text, &document); !reflect.DeepEqual(found, document) {
						t.Error(path, found)
					}
				}
				checkWeights(t, weights, expected)
				weights.Close()
			}
		})
	}
}

func checkWeights(t *testing.T, weights *ManifestWeights, expected tableResult) {
	t.Helper()
	if pair := quantPair(weights.Quantization()); pair != expected.Quantization {
		t.Error(pair, "expected", expected.Quantization)
	}
	names := sortedKeys(expected.Tensors)
	for name, members := range expected.Groups {
		names = append(names, name)
		if found, ok := weights.Group(name); !ok || !slices.Equal(found, members) {
			t.Error(name, found)
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	if found := weights.Names(); !slices.Equal(found, names) {
		t.Error(found, "expected", names)
	}
	for name, tensor := range expected.Tensors {
		found, err := weights.Tensor(name)
		if err != nil || found.Dtype != tensor.Dtype || fmt.Sprint(found.Shape) != fmt.Sprint(tensor.Shape) ||
			found.Size != tensor.Size || found.Layer != tensor.Layer || weights.IsPart(name) != tensor.Part {
			t.Error(found, "expected", tensor, err)
		}
		data, err := weights.Map(name)
		whole := dataOf(tensor.Layer, tensor.Start, tensor.Size)
		if err != nil || !bytes.Equal(data, whole) {
			t.Error(name, data, err)
		}
		quantization, isQuantized := weights.QuantizationOf(name)
		if isQuantized != (tensor.Quantization != nil) || isQuantized && quantPair(quantization) != *tensor.Quantization {
			t.Error(name, quantization)
		}
		checkExperts(t, weights, found, whole)
	}
}

func checkExperts(t *testing.T, weights *ManifestWeights, tensor Weight, whole []byte) {
	t.Helper()
	if len(tensor.Shape) == 0 {
		return
	}
	var joined []byte
	for index := uint64(0); index < tensor.Shape[0]; index++ {
		expert, err := weights.Expert(tensor.Name, index)
		if err != nil {
			t.Error(err)
		}
		joined = append(joined, expert...)
	}
	if !bytes.Equal(joined, whole) {
		t.Error(tensor.Name, "experts are not the tensor")
	}
	if _, err := weights.Expert(tensor.Name, tensor.Shape[0]); !errors.Is(err, ErrNoExpert) {
		t.Error(err)
	}
}

func TestInvalidSafetensorsFilesAreRefused(t *testing.T) {
	for _, refused := range readTable(t).Refused {
		t.Run(refused.What, func(t *testing.T) {
			client := serveFiles(t, []namedFile{{tensorType, "w", refused.file(t, 0)}})
			_, err := client.OpenWeights("m", "")
			if CodeOf(err) != CodeInvalidInput || !errors.Is(err, ErrWeights) || !errors.Is(err, ErrSafetensors) ||
				!strings.HasPrefix(err.Error(), `layer "w": safetensors: `) {
				t.Error(err)
			}
		})
	}
}

func TestNamesThatAreNoTensors(t *testing.T) {
	group := tableLayer{Header: new(string)}
	*group.Header = `{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`
	group.Data = 1
	client := serveFiles(t, []namedFile{{tensorType, "g", group.file(t, 0)}, {jsonType, "broken.json", []byte("{")}})
	weights, err := client.OpenWeights("m", "")
	if err != nil {
		t.Fatal(err)
	}
	defer weights.Close()
	if !weights.Has("g") || !weights.Has("a") || weights.Has("b") {
		t.Error(weights.Names())
	}
	if _, err := weights.Map("b"); !errors.Is(err, ErrNoTensor) || CodeOf(err) != CodeNotFound {
		t.Error(err)
	}
	_, err = weights.Map("g")
	text := `"g" is a group of tensors; request one of them, such as "a"`
	if !errors.Is(err, ErrGroup) || CodeOf(err) != CodeInvalidRequest || err.Error() != text {
		t.Error(err)
	}
	if _, err := weights.JSON("broken.json", new(any)); !errors.Is(err, ErrWeights) {
		t.Error(err)
	}
	if found, err := weights.JSON("none.json", new(any)); found || err != nil {
		t.Error(found, err)
	}
}

func TestHalfOfASurrogatePairIsFound(t *testing.T) {
	for text, expected := range map[string]bool{
		`"\ud83d\ude00"`: false, `"\ud83d"`: true, `"\ude00\ud83d"`: true, `"\\ud83d"`: false, `"\u0041"`: false,
		`"\ud83d\\ude00"`: true, `"\ud83d\u0041"`: true, `"\uD83D\uDE00\uD83D"`: true,
	} {
		if hasHalfPair([]byte(text)) != expected {
			t.Error(text)
		}
	}
}
