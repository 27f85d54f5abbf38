// What GitOps tools say of objects: kstatus, a health check of Argo CD in Lua, and one of Flux in CEL.
//
// Reads one JSON document on standard input, writes one on standard output. kstatus and Flux's evaluator are their own;
// Lua's interpreter is the one that Argo CD has, with fewer libraries than there. The object is its global `obj`.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/fluxcd/pkg/apis/kustomize"
	"github.com/fluxcd/pkg/runtime/cel"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
	"specdecode.io/devcluster/tools/lua"
)

type question struct {
	// A health check of Argo CD.
	Lua string `json:"lua"`
	// Of a Kustomization of Flux.
	CEL     kustomize.HealthCheckExpressions `json:"cel"`
	Objects []*unstructured.Unstructured     `json:"objects"`
}

type answer struct {
	Kstatus string      `json:"kstatus"`
	Argo    *lua.Health `json:"argo"`
	Flux    string      `json:"flux"`
}

func main() {
	var asked question
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		fail(err)
	}
	flux, err := cel.NewStatusEvaluator(&asked.CEL)
	if err != nil {
		fail(err)
	}
	answers := []answer{}
	for _, object := range asked.Objects {
		said, err := judge(object, asked.Lua, flux)
		if err != nil {
			fail(fmt.Errorf("%s %s: %w", object.GetKind(), object.GetName(), err))
		}
		answers = append(answers, said)
	}
	if err := json.NewEncoder(os.Stdout).Encode(answers); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func judge(object *unstructured.Unstructured, script string, flux *cel.StatusEvaluator) (answer, error) {
	found, err := status.Compute(object)
	if err != nil {
		return answer{}, err
	}
	argo, err := lua.Judge(script, object.Object)
	if err != nil {
		return answer{}, err
	}
	said, err := flux.Evaluate(context.Background(), object)
	if err != nil {
		return answer{}, err
	}
	return answer{string(found.Status), argo, string(said.Status)}, nil
}
