/* Lists a model's tensors, prints facts from its header and the first bytes of a tensor, and opens the model as one GGUF file:
 * cc first_values.c -lblobd_client -o first_values && ./first_values llama3:8b token_embd.weight */
#include <blobd_client.h>
#include <inttypes.h>
#include <stdio.h>

static int failed(const blobd_error *error) {
    fprintf(stderr, "%s\n", error->message);
    return error->code;
}

int main(int count, char **arguments) {
    if (count < 3) {
        fprintf(stderr, "usage: first_values MODEL TENSOR\n");
        return 2;
    }
    blobd_error error;
    blobd_model *model = blobd_open(NULL, arguments[1], &error);
    if (model == NULL) return failed(&error);

    blobd_tensor tensor;
    for (size_t i = 0; blobd_tensor_at(model, i, &tensor); i++) {
        printf("%-32s %-6s %12" PRIu64 " bytes\n", tensor.name, tensor.type_name, tensor.size);
    }

    blobd_facts facts;
    if (blobd_facts_of(model, &facts, &error)) {
        printf("%s, %" PRIu64 " parameters, %" PRIu64 " blocks, context %" PRIu64 ", %" PRIu64 " heads\n",
               facts.architecture, facts.parameter_count, facts.block_count, facts.context_length,
               facts.head_count_max);
        if (facts.chat_template != NULL) printf("template: %s\n", facts.chat_template);
    }
    float base;
    if (blobd_metadata_f32(model, "rope.freq_base", &base)) printf("rope.freq_base: %g\n", base);

    blobd_bytes bytes;
    size_t index = blobd_tensor_find(model, arguments[2]);
    if (!blobd_map(model, index, &bytes, &error)) {
        blobd_close(model);
        return failed(&error);
    }
    printf("%s:", arguments[2]);
    for (size_t i = 0; i < bytes.size && i < 8; i++) {
        printf(" %02x", ((const unsigned char *)bytes.data)[i]);
    }
    printf("\n");
    if (blobd_expert(model, index, 0, &bytes, NULL)) printf("expert 0: %zu bytes\n", bytes.size);

    blobd_image *image = blobd_contiguous(model, NULL, &error);
    blobd_close(model); /* the image stays valid */
    if (image == NULL) return failed(&error);
    bytes = blobd_image_bytes(image);
    printf("image: %.4s, %zu bytes, %zu of them copied\n", (const char *)bytes.data, bytes.size,
           blobd_image_copied_bytes(image));
    blobd_image_free(image);
    return 0;
}
