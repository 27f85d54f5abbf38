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
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
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
	Argo    *argoHealth `json:"argo"`
	Flux    string      `json:"flux"`
}

type argoHealth struct {
	Status  string `json:"status"`
	Message string `json:"message"`
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
	argo, err := argoSays(object, script)
	if err != nil {
		return answer{}, err
	}
	said, err := flux.Evaluate(context.Background(), object)
	if err != nil {
		return answer{}, err
	}
	return answer{string(found.Status), argo, string(said.Status)}, nil
}

func argoSays(object *unstructured.Unstructured, script string) (*argoHealth, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	libraries := []struct {
		name string
		open lua.LGFunction
	}{
		{lua.LoadLibName, lua.OpenPackage},
		{lua.BaseLibName, lua.OpenBase},
		{lua.TabLibName, lua.OpenTable},
	}
	for _, library := range libraries {
		call := lua.P{Fn: state.NewFunction(library.open), NRet: 0, Protect: true}
		if err := state.CallByParam(call, lua.LString(library.name)); err != nil {
			return nil, err
		}
	}
	state.SetGlobal("obj", luaValue(state, object.Object))
	if err := state.DoString(script); err != nil {
		return nil, err
	}
	table, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return nil, fmt.Errorf("the script returns %s, not a table", state.Get(-1).Type())
	}
	return &argoHealth{lua.LVAsString(table.RawGetString("status")), lua.LVAsString(table.RawGetString("message"))}, nil
}

func luaValue(state *lua.LState, value any) lua.LValue {
	switch each := value.(type) {
	case bool:
		return lua.LBool(each)
	case string:
		return lua.LString(each)
	case int64:
		return lua.LNumber(each)
	case float64:
		return lua.LNumber(each)
	case []any:
		table := state.NewTable()
		for _, item := range each {
			table.Append(luaValue(state, item))
		}
		return table
	case map[string]any:
		table := state.NewTable()
		for key, item := range each {
			table.RawSetString(key, luaValue(state, item))
		}
		return table
	}
	return lua.LNil
}
